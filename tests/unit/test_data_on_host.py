"""Data that JAX reads without TensorFlow: the same batches as through TensorFlow, at any position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.config.run import Data

tf = pytest.importorskip("tensorflow")

from distlaunch.data import csv, text_lines  # noqa: E402
from distlaunch.data.batches import Share, Source  # noqa: E402
from distlaunch.data.class_weights import class_weights  # noqa: E402
from distlaunch.data.examples.pending_events import take_events  # noqa: E402
from distlaunch.data.on_host import rows as on_host  # noqa: E402
from distlaunch.data.on_host.ahead import map_ahead  # noqa: E402
from distlaunch.data.recorded_rows import RowRecorder, Rows, read_batch  # noqa: E402
from distlaunch.data.rows import rows_of_process  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402
from distlaunch.data.splits import PyData  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
X = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
Y = np.arange(23, dtype=np.int64) % 4


class Items:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return {"b": X[index], "a": float(index)}, Y[index]


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return X[5 * index : 5 * index + 5], Y[5 * index : 5 * index + 5]


def _table(folder: Path) -> Any:
    lines = [f"{row},{row / 2},{row % 3}" for row in range(23)]
    (folder / "table.csv").write_text("\n".join(["one,two,label", *lines, ""]))
    return csv(folder / "table.csv", label="label")


DATA: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda folder: (X, Y),
    "a dict": lambda folder: {"y": Y, "x": X},
    "text": lambda folder: ({"x": X, "text": np.array(["a", "", "größer"])[Y % 3]}, Y),
    "items": lambda folder: Items(),
    "files": _table,
    "batches": lambda folder: PyData(Batches(), Batches),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"remainder": "drop"},
    {"shuffle": False, "threads": 3},
    {"train_examples": 17, "class_weight": {0: 2.0, 2: 0.5}},
]


def _config(**keys: Any) -> Data:
    return Data.model_validate({"function": "unused:unused", "global_batch": 5, **keys})


def _read(source: Source, steps: int, **part: int) -> Iterator[tuple[Any, int, int]]:
    read = on_host.rows_of_process if source.on_host else rows_of_process
    for batch, start, total in islice(read(source, **(part or {"first": 0, "number": 1, "of": 1})), steps):
        arrays = keras.tree.map_structure(np.asarray, batch) if int(total) else None
        yield arrays, int(start), int(total)


def _assert_equal(ones: Any, others: Any) -> None:
    for (batch, *place), (other, *other_place) in zip(ones, others, strict=True):
        assert place == other_place
        if batch is not None:
            assert keras.tree.map_structure(lambda leaf: leaf.dtype, batch) == keras.tree.map_structure(
                lambda leaf: leaf.dtype, other
            )
            keras.tree.map_structure(np.testing.assert_array_equal, batch, other)


def _cases() -> Iterator[Any]:
    """Yield all pairs of data and settings; in CI each kind of data once, and each setting at least once.

    "A dict" has no labels, which class weights need.
    """
    for row, kind in enumerate(DATA):
        for column, settings in enumerate(SETTINGS):
            if kind == "a dict" and "class_weight" in settings:
                continue
            marks = [] if row % len(SETTINGS) == column else [pytest.mark.slow]
            yield pytest.param(kind, settings, id=f"{kind}-{settings}", marks=marks)


@pytest.mark.parametrize(("kind", "settings"), list(_cases()))
def test_batches_are_those_of_tensorflow(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    config = _config(**settings)
    both = [make_split(DATA[kind](tmp_path), config, seed=3, training=True, on_host=on) for on in (True, False)]
    assert [split.on_host for split in both] == [True, False]
    ours, theirs = both
    assert ours.describe() == theirs.describe()
    facts = [(each.num_examples, each.num_batches, each.global_batch, each.work, each.threads) for each in both]
    assert facts[0] == facts[1]
    for visible, position in ((True, {}), (False, {"batches": 9}), (True, {"passes": 2})):
        if position.get("passes") and ours.num_batches is None:
            continue
        sources = [each.training_source(1, 2, ends_visible=visible, **position) for each in both]
        assert sources[0].first == sources[1].first
        _assert_equal(*(_read(source, 13) for source in sources))
    _assert_equal(*(_read(each.in_order().evaluation_source(), 7) for each in both))
    _assert_equal(*(_read(each.evaluation_source(2), 4) for each in both))
    rows = [keras.tree.map_structure(np.asarray, each.first_rows(2)) for each in both]
    keras.tree.map_structure(np.testing.assert_array_equal, *rows)


def test_a_process_reads_its_rows() -> None:
    both = [make_split((X, Y), _config(global_batch=6), seed=3, training=True, on_host=on) for on in (True, False)]
    for part in ({"first": 1, "number": 1, "of": 3}, {"first": 1, "number": 2, "of": 3}):
        sources = [each.training_source(0, 0, ends_visible=True) for each in both]
        _assert_equal(*(_read(source, 6, **part) for source in sources))


def test_a_share_of_other_data() -> None:
    both = [
        make_split((X, Y), _config(sharding="function"), seed=3, training=True, share=Share(1, 2), on_host=on)
        for on in (True, False)
    ]
    longer = [each.with_length(10, None) for each in both]
    for splits in (both, longer):
        sources = [each.training_source(0, 0, ends_visible=True) for each in splits]
        _assert_equal(*(_read(source, 12) for source in sources))


@pytest.mark.parametrize(
    "given",
    [
        ([1, 2, 3], [None, 2, 3]),
        (np.array(["2001-01-01"] * 3, "datetime64[D]"), np.zeros(3)),
        (np.zeros(3), np.zeros(4)),
        (1.0, 2.0),
    ],
)
def test_arrays_that_cannot_be_used_give_the_same_message(given: Any) -> None:
    messages = []
    for on in (True, False):
        with pytest.raises(ConfigError) as raised:
            make_split(given, _config(), seed=0, training=True, on_host=on)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_functions_and_files_that_need_tensorflow_are_read_by_it(tmp_path: Path) -> None:
    pipeline = tf.data.Dataset.from_tensor_slices((X, Y))
    assert not make_split(pipeline, _config(), seed=0, training=True, on_host=True).on_host
    mapped = _config(map="tests.unit.test_data_on_host:double")
    assert not make_split((X, Y), mapped, seed=0, training=True, on_host=True).on_host
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    lines = make_split(text_lines(tmp_path / "lines.txt"), _config(), seed=0, training=False, on_host=True)
    assert lines.first_rows(2).tolist() == [b"one", b"two"]


def double(x: Any, y: Any) -> Any:
    return 2 * x, y


class Failing(Items):
    def __getitem__(self, index: int) -> Any:
        if index in (3, 4):
            raise OSError("lost")
        return super().__getitem__(index)


def test_an_example_that_fails_is_named_or_skipped() -> None:
    stopping = make_split(Failing(), _config(shuffle=False), seed=0, training=True, on_host=True)
    with pytest.raises(DataError, match="example 3 cannot be read: OSError: lost"):
        list(_read(stopping.training_source(0, 0, ends_visible=True), 2))
    skipping = make_split(Failing(), _config(shuffle=False, on_error="skip"), seed=0, training=True, on_host=True)
    first = next(_read(skipping.training_source(0, 0, ends_visible=True), 1))[0]
    assert first[0]["a"].tolist() == [0, 1, 2, 5, 5]
    assert {event.example for event in take_events()} == {"example 3", "example 4"}  # pyright: ignore[reportAttributeAccessIssue]


def test_class_weights() -> None:
    weigh = class_weights({0: 2.0, 2: 0.5})
    smooth = np.array([0.05, 0.95, 1.9999999, 2.4], np.float32)  # Keras rounds
    integers = np.array([0, 1, 2, 9, -1])
    for labels in (integers, smooth, smooth[:, None], np.array([[0], [1], [2]]), np.eye(3, dtype=np.float32)):
        ours = weigh((labels, labels))[2]
        theirs = np.asarray(weigh((labels, tf.constant(labels)))[2])
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert weigh((smooth, smooth))[2].tolist() == [2.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("labels", [{"a": np.zeros(2), "b": np.zeros(2)}, (np.zeros(2), np.zeros(2))])
def test_class_weights_of_several_outputs_are_an_error(labels: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.class_weight: supports models with one output only"):
        class_weights({0: 2.0})((np.zeros(2), labels))


def test_class_weights_of_labels_with_an_unknown_number_of_columns() -> None:
    weigh = class_weights({0: 2.0, 2: 0.5})
    spec = tf.TensorSpec([None, None], tf.float32)
    weights_of = tf.function(lambda y: weigh((y, y))[2], input_signature=[spec])
    assert weights_of(tf.constant([[0.0], [0.95], [2.0]])).numpy().tolist() == [2.0, 1.0, 0.5]
    assert weights_of(tf.eye(3)).numpy().tolist() == [2.0, 1.0, 0.5]


def test_recorded_rows_come_back() -> None:
    kept: list[Rows] = []
    recorder = RowRecorder({1}, kept.append)
    batch = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "y": np.array([True, False, True])}
    for index in range(3):
        recorder.record(index, batch, 0, 3, 3)  # pyright: ignore[reportArgumentType]
    (rows,) = [Rows.from_bytes(each.to_bytes()) for each in kept]
    found = read_batch(recorder.spec, [rows, rows])
    assert found["x"].tolist() == [*batch["x"].tolist()] * 2
    assert found["y"].dtype == bool


def test_results_come_in_order_and_errors_rise() -> None:
    assert list(map_ahead(lambda n: n * n, range(20), 4, lambda _: 3)) == [n * n for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        list(map_ahead(lambda n: 1 / n, [2, 1, 0, 1], 2, lambda _: 2))


@pytest.mark.parametrize(("quick_s", "in_threads"), [(-1.0, [False, False, False, True, True]), (60.0, [False] * 5)])
def test_only_slow_batches_are_loaded_in_threads(
    quick_s: float, in_threads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_host, "QUICK_S", quick_s)
    threads: list[threading.Thread] = []

    def load(rows: np.ndarray, *, at_once: int) -> np.ndarray:
        threads.append(threading.current_thread())
        return rows + at_once

    source = Source([np.array([number]) for number in range(5)], load, on_host=True)
    loaded = [batch for batch, _, _ in on_host.rows_of_process(source, first=0, number=1, of=1)]
    assert np.concatenate(loaded).tolist() == [1, 2, 3, 4, 5]
    assert [thread is not threading.main_thread() for thread in threads] == in_threads
