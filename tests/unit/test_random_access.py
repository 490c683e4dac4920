"""Examples by number, of any types and shapes: each is read once, in a fixed order, and with its values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.cluster.cores import num_cores
from distlaunch.config.run import Data

tf = pytest.importorskip("tensorflow")

from distlaunch.data.differences import different_data  # noqa: E402
from distlaunch.data.examples import each_example  # noqa: E402
from distlaunch.data.examples.each_example import num_threads  # noqa: E402
from distlaunch.data.examples.random_access import Items  # noqa: E402
from distlaunch.data.examples.read_failures import data_errors_raised, reading  # noqa: E402
from distlaunch.data.files.base import RecordError  # noqa: E402
from distlaunch.data.rows import rows_of_process, split_rows  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402
from tests.documents import snippet  # noqa: E402

FEWER = settings(max_examples=max(4, settings().max_examples // 16))  # each builds its graphs
pytestmark = pytest.mark.usefixtures("virtual_devices")


class Given:
    """Examples that a function makes."""

    def __init__(self, number: int, make: Callable[[int], Any]) -> None:
        self.number, self.make = number, make

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def config(**keys: Any) -> Data:
    return Data.model_validate({"function": "unused:unused", "global_batch": 5, **keys})


def whole(source: Any, replicas: int = 1) -> list[Any]:
    """The parts of all replicas, step by step, to the end of one pass."""
    parts = [
        iter(split_rows(source, first_replica=replica, num_local=1, num_replicas=replicas))
        for replica in range(replicas)
    ]
    steps = []
    while True:
        elements = [next(part) for part in parts]
        if elements[0][2] == 0:
            return steps
        steps.append([tf.nest.map_structure(lambda leaf, n=int(rows): leaf[:n].numpy(), batch)
                      for batch, rows, *_ in elements])  # fmt: skip


leaves = st.one_of(
    arrays_of.arrays(np.dtype("float32"), st.tuples(st.integers(0, 3), st.integers(1, 2))),
    arrays_of.arrays(np.dtype("int8"), ()),
    st.integers(-(2**40), 2**40),
    st.booleans(),
    st.text(max_size=4),
    st.binary(max_size=4).filter(lambda value: not value.endswith(b"\0")),
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=3),
)
examples = st.one_of(
    st.tuples(leaves, leaves),
    st.tuples(st.dictionaries(st.sampled_from(["a", "b c", "ä"]), leaves, min_size=1), leaves, st.just(1.0)),
    leaves.filter(lambda value: not isinstance(value, list)),
    st.dictionaries(st.sampled_from(["a", "z"]), leaves, min_size=1),
)


def expected(leaf: Any) -> Any:
    return leaf.encode() if isinstance(leaf, str) else leaf


@FEWER
@given(example=examples, number=st.integers(1, 12), replicas=st.integers(1, 4), batch=st.integers(1, 6))
def test_every_type_comes_as_it_was_given(example: Any, number: int, replicas: int, batch: int) -> None:
    split = make_split(Given(number, lambda _: example), config(global_batch=batch), seed=0, training=False)
    rows = 0
    for parts in whole(split.evaluation_source(), replicas):
        for part in parts:
            flat = tf.nest.flatten(part)
            rows += len(flat[0])
            for leaf, value in zip(flat, tf.nest.flatten(_without_lists(example)), strict=True):
                for row in leaf:
                    np.testing.assert_array_equal(row, np.asarray(expected(value), leaf.dtype))
    assert rows == number


def _without_lists(example: Any) -> Any:
    if isinstance(example, dict):
        return {name: _without_lists(value) for name, value in example.items()}
    if isinstance(example, tuple):
        return tuple(_without_lists(value) for value in example)
    return np.asarray(example, np.float32) if isinstance(example, list) else example


@FEWER
@given(number=st.integers(1, 40), batch=st.integers(1, 12), replicas=st.integers(1, 5), seed=st.integers(0, 2**31),
       passes=st.integers(1, 3), drop=st.booleans())  # fmt: skip
def test_the_order_is_that_of_arrays(
    number: int, batch: int, replicas: int, seed: int, passes: int, *, drop: bool
) -> None:
    keys = config(global_batch=batch, remainder="drop" if drop else "keep")
    if drop and number < batch:
        return
    x = np.arange(number)
    sources = []
    for data in (Given(number, lambda index: (index, index)), (x, x), Given(number, lambda index: (index, index))):
        split = make_split(data, keys, seed=seed, training=True)
        sources.append(split.training_source(0, 0, ends_visible=False, batches=passes * (split.num_batches or 0)))
    items = [np.concatenate([part[0] for part in parts]).tolist() for parts in whole(sources[0], replicas)]
    arrays = [parts[0][0].tolist() for parts in whole(sources[1])]
    assert items == arrays
    assert len(items) == passes * (number // batch if drop else -(-number // batch))
    process = rows_of_process(sources[2], first=0, number=1, of=1)
    assert [element[0][0].numpy().tolist() for element in process.take(len(items))] == items


@FEWER
@given(replicas=st.integers(1, 4), kind=st.sampled_from(["items", "arrays", "pipeline"]), start=st.integers(0, 4))
def test_augment_gets_a_seed_for_each_epoch_and_example(replicas: int, kind: str, start: int) -> None:
    def augment(x: Any, y: Any, seed: Any) -> Any:
        return tf.stack([tf.cast(x, tf.int64), *tf.unstack(seed)]), y

    x = np.arange(12)
    data = {
        "items": Given(12, lambda index: (index, index)),
        "arrays": (x, x),
        "pipeline": tf.data.Dataset.from_tensor_slices((x, x)),
    }[kind]
    split = make_split_with(data, augment=augment, seed=7)
    assert split.num_batches == 3
    source = split.training_source(*divmod(start, 3), ends_visible=False, batches=6 - start)
    rows = [row.tolist() for parts in whole(source, replicas) for part in parts for row in part[0]]
    assert all(index == example for example, _, index in rows)
    assert len({(key, index) for _, key, index in rows}) == len(rows)
    assert {key for _, key, _ in rows} <= {7 * 1_000_003, 7 * 1_000_003 + 1}


def make_split_with(data: Any, function: Any = None, augment: Any = None, seed: int = 0, **keys: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        functions = {"unused:map": function, "unused:augment": augment}
        patch.setattr(each_example, "load_function", lambda reference, key: functions[reference])
        names = {name.partition(":")[2]: name for name, each in functions.items() if each is not None}
        return make_split(data, config(**names, **keys), seed=seed, training=True)


OTHER = np.zeros(4)
BAD: list[tuple[Any, type[Exception], str]] = [
    (Given(0, lambda index: index), ConfigError, "its length is 0"),
    (Given(9, lambda index: (object(), 1)), ConfigError, "example 0 contains object"),
    (Given(9, lambda index: (1,) * (1 + index % 2)), DataError, "it has 2 parts, but example 0 has 1"),
    (Given(9, lambda index: OTHER if index == 5 else OTHER[1:]), DataError, r"example 5 .*: its shape is \(4,\)"),
    (Given(9, lambda index: 1.5 if index else 1), ConfigError, "differ in type: int64 in the first, float32"),
    (Given(9, lambda index: 1 // (index - 5)), DataError, "example 5 cannot be read: ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "kind", "told"), BAD)
def test_what_cannot_be_used_is_named(data: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told), data_errors_raised():
        whole(make_split(data, config(), seed=0, training=True).evaluation_source())


class Wrapped(Given):
    """Gives the records of files, which name themselves when they cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == self.number - 1:
            raise RecordError(index, "photos.tar, sample a/7", "ValueError: broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("number", [9, 1_500])
def test_an_example_is_named_once(number: int) -> None:
    with pytest.raises(DataError) as found, reading(f"example {number - 1}"):
        Wrapped(number, lambda index: index)[number - 1]
    assert (
        str(found.value) == f"data: example {number - 1:,} cannot be read (photos.tar, sample a/7): ValueError: broken"
    )
    with pytest.raises(DataError) as found, reading("example 3"):
        Wrapped(number, lambda index: index)[number - 1]
    assert str(found.value).startswith(f"data: example 3 cannot be read: example {number - 1:,} cannot be read (photos")


def test_objects_without_an_end_are_refused() -> None:
    class Endless(Given):
        def __len__(self) -> int:
            raise OverflowError("cannot fit 'int' into an index-sized integer")

    with pytest.raises(ConfigError, match="length cannot be read"):
        make_split(Endless(1, lambda index: index), config(), seed=0, training=True)


def test_a_map_that_does_not_fit_the_examples() -> None:
    with pytest.raises(ConfigError, match=r"called with \(x, y\), which one\(x\) does not take"):
        make_split_with(Given(9, lambda index: (index, index)), one).first_rows(2)
    with pytest.raises(ConfigError, match=r"called with the example, which two\(x, y\) does not take"):
        make_split_with(tf.data.Dataset.range(9), two).first_rows(2)
    augmented = make_split_with(tf.data.Dataset.range(9), augment=seeded)
    with pytest.raises(ConfigError, match=r"data.augment: it is called with the example, which seeded\(x, y, seed\)"):
        augmented.first_rows(2)


def one(x: Any) -> Any:
    return x


def two(x: Any, y: Any) -> Any:
    return x, y


def seeded(x: Any, y: Any, seed: Any) -> Any:
    return x, y


@pytest.mark.parametrize("change", ["none", "values", "number", "types", "order"])
@pytest.mark.parametrize("kind", ["items", "arrays", "pipeline"])
def test_what_differs_between_processes_is_named(change: str, kind: str) -> None:
    def described(changed: bool) -> str:
        x = np.random.default_rng(0).normal(size=(50, 2)).astype("float32")
        if changed and change == "values":
            x = x + 1
        if changed and change == "types":
            x = x.astype("float64")
        if changed and change == "order":
            x = x[::-1].copy()
        x = x[:40] if changed and change == "number" else x
        data: Any = (x, x)
        if kind == "items":
            data = Given(len(x), lambda index: (x[index], x[index]))
        if kind == "pipeline":
            data = tf.data.Dataset.from_tensor_slices((x, x))
        return make_split(data, config(), seed=0, training=True).describe()

    wrong = different_data({"worker:0": {"training": described(False)}, "worker:1": {"training": described(True)}})
    if change == "none" or (change == "number" and kind == "pipeline"):  # their lengths are compared besides
        assert wrong == ""
        return
    assert "for training: " in wrong
    assert "worker:1" in wrong
    assert ("types in" if change == "types" else "example ") in wrong


def test_read_ahead_begins_no_pass_behind_the_last() -> None:
    begun = []

    def generate() -> Any:
        begun.append(1)
        yield from ([float(index)] for index in range(10))

    data = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([1]))
    split = make_split(data, config(), seed=0, training=True)
    for limit in ({"batches": 4}, {"passes": 2}):
        begun.clear()
        source = split.training_source(0, 0, ends_visible="passes" in limit, **limit)
        for _ in iter(split_rows(source, first_replica=0, num_local=1, num_replicas=1).take(20)):
            pass
        assert len(begun) <= 3  # two passes, and the head from which the size of an example is learnt


def test_the_buffer_of_a_shuffle_holds_so_many_bytes() -> None:
    data = tf.data.Dataset.from_tensor_slices(np.zeros((100, 25), np.float32))
    described = make_split(data, config(shuffle_buffer_bytes=2_000), seed=0, training=True).describe()
    assert "within 20 examples" in described
    texts = tf.data.Dataset.from_tensor_slices([b"x" * 100] * 30)
    assert "within 5 examples" in make_split(texts, config(shuffle_buffer_bytes=500), seed=0, training=True).describe()
    assert "within 7 examples" in make_split(texts, config(shuffle=7), seed=0, training=True).describe()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    assert (num_threads(config()), num_threads(config(threads=9))) == (3, 9)


def test_more_threads_than_cores_wait_at_the_same_time() -> None:
    threads = 4 * num_cores()
    arrived: list[int] = []
    all_there = threading.Event()
    all_there.set()  # while the first examples are read for their shapes

    def make(index: int) -> Any:
        if not all_there.is_set():
            arrived.append(index)
            if len(arrived) == threads:
                all_there.set()
            if not all_there.wait(30):
                raise TimeoutError(f"{len(arrived)} examples are read at the same time")
        return index, index

    items = Given(8 * threads, make)
    split = make_split(items, config(global_batch=2 * threads, threads=threads), seed=0, training=False)
    source = split.evaluation_source()
    all_there.clear()
    steps = whole(source)
    assert [label for [(_, labels)] in steps for label in labels.tolist()] == list(range(8 * threads))


def test_the_page_on_input(tmp_path: Path) -> None:
    names: dict[str, Any] = {"np": np, "tf": tf}
    exec(snippet("input.md", "class Photos:"), names)
    for index in range(7):
        np.save(tmp_path / f"{index}.npy", np.full((4, 4, 1), index, np.float32))
    photos = names["Photos"]([tmp_path / f"{index}.npy" for index in range(7)], list(range(7)))
    split = make_split(photos, config(), seed=0, training=False)
    [first, second] = whole(split.evaluation_source())
    assert first[0][0][:, 0, 0, 0].tolist() == first[0][1].tolist() == [0, 1, 2, 3, 4]
    assert second[0][1].tolist() == [5, 6]
    exec(snippet("input.md", "def augment("), names)
    image, label = names["augment"](tf.ones([4, 4, 1]), 3, tf.constant([1, 2], tf.int64))
    assert (image.shape, label) == ((4, 4, 1), 3)


def test_items_are_read_once_for_shapes_and_comparison() -> None:
    reads: list[int] = []

    def make(index: int) -> Any:
        reads.append(index)
        return index, index

    Items(Given(1_000, make), None).describe()
    assert len(reads) <= 16
