"""The file that `predict` writes, and which examples it predicts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import ml_dtypes
import tensorflow as tf

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.config.run import RunConfig
from distlaunch.data.source import open_splits
from distlaunch.data.splits import Splits
from distlaunch.strategies.predictions import concatenate_batches, make_predict_call
from distlaunch.training.predictions import named_arrays, split_in_order, write_arrays

pytestmark = pytest.mark.usefixtures("virtual_devices")
ONE = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_each_output_has_a_name() -> None:
    assert list(named_arrays(ONE)) == ["predictions"]
    assert list(named_arrays({"label": ONE, "more": {"total": ONE}})) == ["label", "more/total"]
    assert list(named_arrays((ONE, [ONE, ONE]))) == ["0", "1/0", "1/1"]


def test_files(tmp_path: Path) -> None:
    write_arrays(tmp_path / "new" / "a.npz", {"more/total": ONE, "file": ONE.astype(ml_dtypes.bfloat16)})
    with np.load(tmp_path / "new" / "a.npz") as loaded:
        assert {name: loaded[name].dtype.name for name in loaded} == {"more/total": "float32", "file": "float32"}
        np.testing.assert_array_equal(loaded["more/total"], ONE)
    write_arrays(tmp_path / "a.npy", {"predictions": ONE})
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), ONE)
    with pytest.raises(UsageError, match=r"holds only one array, but the model predicts a, b; use \.npz"):
        write_arrays(tmp_path / "a.npy", {"a": ONE, "b": ONE})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "new"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"a\.npz: the predictions cannot be written: No space left on device"):
        write_arrays(tmp_path / "a.npz", {"predictions": ONE})
    assert not list(tmp_path.iterdir())


def test_batches_are_joined() -> None:
    assert concatenate_batches([{"a": ONE}, {"a": ONE[:1]}])["a"].shape == (4, 2)
    with pytest.raises(ConfigError, match=r"\(2,\) and \(3,\) for one example"):
        concatenate_batches([ONE, np.zeros((2, 3))])
    with pytest.raises(ConfigError, match="no examples"):
        concatenate_batches([])


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("uint64", [2**63 + 1, 2**64 - 1, 0]),
        ("int64", [-(2**63), 2**63 - 1, 2**40]),
        ("uint32", [2**32 - 1, 2**31, 7]),
        ("int32", [-(2**31), 2**31 - 1, 7]),
        ("uint8", [255, 0, 7]),
        ("bool", [True, False, True]),
        ("float16", [0.5, 65504.0, -1.0]),
        ("float64", [1e300, 2.0**-1000, 1.0]),
    ],
)
def test_processes_give_each_other_every_value_of_a_type(dtype: str, values: list[Any]) -> None:
    """Each example of the model's second output has two rows."""
    expected = np.array(values, dtype)
    found = predict_on_two_replicas(expected, lambda x: {"one": x, "two": tf.repeat(x, 2)}, num_processes=2)
    assert {name: array.dtype for name, array in found.items()} == {"one": expected.dtype, "two": expected.dtype}
    np.testing.assert_array_equal(found["one"], expected)
    np.testing.assert_array_equal(found["two"], np.repeat(expected, 2))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_replica_without_examples_adds_no_rows(num_processes: int) -> None:
    found = predict_on_two_replicas(ONE[:1], lambda x: tf.repeat(x, 3, axis=0), num_processes)
    np.testing.assert_array_equal(found, np.repeat(ONE[:1], 3, axis=0))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_rows_without_a_place_among_those_of_other_replicas_are_refused(num_processes: int) -> None:
    with pytest.raises(ConfigError, match=r"does not follow from the number of examples \(1 for 2 and 1 for 1\)"):
        predict_on_two_replicas(ONE, lambda x: tf.reduce_sum(x, axis=0, keepdims=True), num_processes)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_rows_of_other_shapes_are_refused(num_processes: int) -> None:
    """The processes find out before they add up arrays of other shapes, which would end them as if one were lost."""

    def of_other_width(x: tf.Tensor) -> tf.Tensor:
        return tf.repeat(x, 2 + tf.distribute.get_replica_context().replica_id_in_sync_group, axis=1)

    with pytest.raises(ConfigError, match=r"the replicas differ in shape \(\(2,\) and \(3,\)\)"):
        predict_on_two_replicas(ONE[:, :1], of_other_width, num_processes)
    found = predict_on_two_replicas(ONE[:1, :1], of_other_width, num_processes)
    np.testing.assert_array_equal(found, [[0.0, 0.0]], err_msg="a stand-in row of another shape is left out")


def predict_on_two_replicas(x: np.ndarray, function: Callable[[Any], Any], num_processes: int) -> Any:
    class Model:
        def predict_step(self, batch: Any) -> Any:
            return function(batch)

    # collectives of several strategies in one process would get into each other's way
    sums = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=sums)
    total = len(x)
    first = (total + 1) // 2
    # batch, rows, total, start; a replica without rows has a stand-in row
    parts = [(x[:first], first, total, 0), (x[first:] if total > first else x[:1], total - first, total, first)]

    def of_replicas(at: int) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group][at])
        )

    model: Any = Model()
    return make_predict_call(strategy, model, num_processes)(tuple(map(of_replicas, range(4))))


GIVEN: dict[str, Any] = {}
"""What the data function returns."""


def given() -> dict[str, Any]:
    return GIVEN


def split_of(tmp_path: Path, name: str, splits: Splits, train: Any = None, **data: Any) -> list[float]:
    GIVEN.clear()
    GIVEN.update(train=splits.train, validation=splits.validation)
    section = {"function": f"{__name__}:given", "global_batch": 4, **data}
    config = RunConfig.model_validate({"model": {"function": "m:f"}, "data": section, "train": train or {}})
    _, train, validation = open_splits(config, RunDir(tmp_path))
    split, steps = split_in_order(config, name, train, validation, "predict")
    source = split.evaluation_source(steps)
    rows = [source.load(element)[0].numpy() for element in source.elements.take(4)]
    return np.concatenate(rows).tolist()


def test_all_examples_of_the_training_split_in_their_order(tmp_path: Path) -> None:
    """Although training shuffles them and drops the last batch."""
    x = np.arange(10.0)
    splits = Splits((x, x), None, "here")
    assert split_of(tmp_path, "train", splits, remainder="drop") == x.tolist()
    assert split_of(tmp_path, "train", splits, train_examples=7) == x[:7].tolist()
    with pytest.raises(ConfigError, match="no validation split to predict"):
        split_of(tmp_path, "validation", splits)


def test_one_epoch_of_a_split_without_end(tmp_path: Path) -> None:
    import tensorflow as tf

    endless = tf.data.Dataset.from_tensor_slices((np.arange(3.0), np.arange(3.0))).repeat()
    splits = Splits(endless, None, "here")
    two = {"steps_per_epoch": 2}
    assert split_of(tmp_path, "train", splits, train=two) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert split_of(tmp_path, "train", splits, train=two, train_examples=4) == [0, 1, 2, 0]
