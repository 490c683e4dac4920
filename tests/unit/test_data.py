"""Every example once, in an order that depends on seed and pass alone, whatever the number of replicas."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.config.run import Data

tf = pytest.importorskip("tensorflow")

from distlaunch.data.class_weights import class_weights  # noqa: E402
from distlaunch.data.rows import rows_of_process, split_rows  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")
ROWS, BATCH = 23, 5


@pytest.fixture
def seeded(virtual_devices: None) -> None:
    """TensorFlow's global seed is set in every run; 0, the default, is the one with which it is most particular."""
    tf.random.set_seed(0)


def config(**keys: Any) -> Data:
    return Data(function="unused:unused", args={}, **{"global_batch": BATCH, **keys})


def as_arrays() -> Any:
    return np.arange(ROWS), np.arange(ROWS) * 10


def as_dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices(as_arrays())


def as_unknown() -> Any:
    return as_dataset().filter(lambda x, y: True)


KINDS = {"arrays": as_arrays, "dataset": as_dataset, "unknown length": as_unknown}


def joined(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain(*parts))


def batches(source: Any, number: int) -> list[list[int]]:
    found = []
    for element in source.elements.take(number):
        x, y = source.load(element)
        assert (y.numpy() == x.numpy() * 10).all()
        found.append(x.numpy().tolist())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_pass_has_each_example_once(kind: str) -> None:
    split = make_split(KINDS[kind](), config(), seed=3, training=True)
    visible = split.num_batches is None
    got = batches(split.training_source(0, 0, ends_visible=visible), 12 if visible else 10)
    if visible:
        assert got.pop(11) == got.pop(5) == []
    first, second = joined(got[:5]), joined(got[5:])
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second != sorted(second)
    assert [len(batch) for batch in got[:5]] == [5, 5, 5, 5, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_source_goes_on(kind: str) -> None:
    """From the middle of the second pass on: what an uninterrupted source gives there."""
    split = make_split(KINDS[kind](), config(), seed=3, training=True)
    visible = split.num_batches is None
    whole = [batch for batch in batches(split.training_source(0, 0, ends_visible=visible), 15) if batch]
    resumed = [batch for batch in batches(split.training_source(1, 2, ends_visible=visible), 5) if batch]
    assert resumed[:4] == whole[7:11]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workers", [1, 2])
def test_replicas_share_each_batch(replicas: int, workers: int) -> None:
    if replicas % workers:
        pytest.skip("replicas are the same in each worker")
    split = make_split(as_arrays(), config(), seed=1, training=True)
    local = replicas // workers
    parts = [
        split_rows(
            split.training_source(0, 0, ends_visible=False),
            first_replica=worker * local,
            num_local=local,
            num_replicas=replicas,
        ).take(5 * local)
        for worker in range(workers)
    ]
    streams = [iter(part.as_numpy_iterator()) for part in parts]
    for whole in batches(split.training_source(0, 0, ends_visible=False), 5):
        elements = [next(stream) for stream in streams for _ in range(local)]
        assert {float(total) for _, _, total, _ in elements} == {len(whole)}
        real = [x.tolist() if rows else [] for (x, _), rows, *_ in elements]
        assert list(itertools.chain(*real)) == whole
        sizes = [len(part) for part in real]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(x) == 1 for (x, _), rows, *_ in elements if rows == 0)  # a stand-in
        starts = [int(start) for *_, start in elements]
        assert starts == list(itertools.accumulate(sizes[:-1], initial=0))


def test_a_process_of_a_mesh_reads_the_rows_that_it_needs() -> None:
    """A process reads only its rows of a batch that divides evenly, and all rows of an uneven last batch.

    In both cases it gets the number of rows of the whole batch.
    """
    split = make_split(as_arrays(), config(), seed=1, training=True)
    whole = batches(split.training_source(0, 0, ends_visible=False), 5)
    for first, number in ((0, 3), (2, 3), (4, 1), (0, 5)):
        own = rows_of_process(split.training_source(0, 0, ends_visible=False), first=first, number=number, of=BATCH)
        for expected, ((x, _), start, total) in zip(whole, own.take(5).as_numpy_iterator(), strict=True):
            divides = len(expected) == BATCH
            assert (start, total) == (first if divides else 0, len(expected))
            assert x.tolist() == (expected[first : first + number] if divides else expected)
    source = split.evaluation_source()
    *_, (_, _, total) = rows_of_process(source, first=0, number=2, of=BATCH).take(7).as_numpy_iterator()
    assert total == 0, "the end"


def test_an_evaluation_source_ends() -> None:
    split = make_split(as_arrays(), config(), seed=1, training=False)
    assert joined(batches(split.evaluation_source(), 5)) == list(range(ROWS))
    assert batches(split.evaluation_source(), 7)[5:] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_drop_and_limits(kind: str) -> None:
    split = make_split(KINDS[kind](), config(remainder="drop", train_examples=13), seed=0, training=True)
    source = split.training_source(0, 0, ends_visible=split.num_batches is None)
    sizes = [len(batch) for batch in batches(source, 4) if batch]
    assert set(sizes) == {BATCH}
    with pytest.raises(ConfigError, match="are too few for a batch"):
        make_split(as_arrays(), config(remainder="drop", train_examples=4), seed=0, training=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 7, BATCH, ROWS, ROWS + 1])
def test_a_limit_is_exact(kind: str, limit: int) -> None:
    split = make_split(KINDS[kind](), config(train_examples=limit), seed=1, training=True)
    read = joined(batches(split.training_source(0, 0, ends_visible=True), ROWS))
    assert sorted(read[: min(limit, ROWS)]) == list(range(min(limit, ROWS)))
    first = split.batches(np.int64(0), np.int64(0))
    assert sum(len(split.load(element)[0]) for element in first) == min(limit, ROWS)


def test_a_map_is_applied_to_each_example(tmp_path: Any) -> None:
    (tmp_path / "mapping.py").write_text("def add(x, y):\n    return x + 1, (x + 1) * 10\n")
    for kind in ("arrays", "dataset"):
        mapped = config(map=f"{tmp_path / 'mapping.py'}:add", shuffle=False)
        split = make_split(KINDS[kind](), mapped, seed=0, training=True)
        assert batches(split.training_source(0, 0, ends_visible=False), 1) == [[1, 2, 3, 4, 5]]


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="differ in length"):
        make_split((np.zeros(3), np.zeros(4)), config(), seed=0, training=True)


class Frame:
    """Object that NumPy converts like a pandas DataFrame."""

    columns = ("age", "kind", "size")
    dtypes = ("int64", "object", "float64")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([[20, "a", 0.5], [30, "b", 1.5]], dtype=object)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (Frame(), ["age int64, kind object, size float64", "return dict(frame)", "FeatureSpace", "to_numpy"]),
        ({"a": np.array(["x", None], dtype=object)}, ["Python objects (NoneType, str)", "replace missing values"]),
        (np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[D]"), ["datetime64[D]", "for example to float32"]),
    ],
)
def test_what_no_tensor_can_hold_is_told_in_words(x: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        make_split((x, np.arange(2)), config(), seed=0, training=True)
    (problem,) = raised.value.problems
    assert problem.dotted == "data.function"
    for word in words:
        assert word in problem.message


def test_a_real_dataframe() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [20, 30], "kind": ["a", "b"], "size": [0.5, 1.5]})
    y = pandas.Series([1, 0], name="bought")
    with pytest.raises(ConfigError, match=r"columns that do not make one array: age int64, kind .*, size float64"):
        make_split((frame, y), config(), seed=0, training=True)
    x, labels = make_split((dict(frame), y), config(), seed=0, training=False).first_rows(2)
    assert {name: tensor.numpy().tolist() for name, tensor in x.items()} == {
        "age": [20, 30],
        "kind": [b"a", b"b"],
        "size": [0.5, 1.5],
    }
    assert labels.numpy().tolist() == [1, 0]
    numbers, _ = make_split((frame[["age", "size"]], y), config(), seed=0, training=False).first_rows(2)
    assert numbers.numpy().tolist() == [[20, 0.5], [30, 1.5]]


def test_an_endless_pipeline_is_known_as_such() -> None:
    split = make_split(as_dataset().repeat(), config(), seed=0, training=True)
    assert split.endless
    assert split.num_batches is None
    assert not make_split(as_dataset(), config(), seed=0, training=True).endless


@pytest.mark.parametrize("shape", ["rows", "column", "one-hot"])
def test_classes_without_a_weight_count_once(shape: str) -> None:
    """A class without a weight has weight 1, as in Keras, even if it is beyond the last class with a weight."""
    labels = np.array([0, 1, 2, 7])
    y = {"rows": labels, "column": labels[:, None], "one-hot": np.eye(8)[labels]}[shape]
    *_, weights = class_weights({1: 2.5})((tf.zeros([4, 1]), tf.constant(y)))
    assert weights.numpy().tolist() == [1, 2.5, 1, 1]
