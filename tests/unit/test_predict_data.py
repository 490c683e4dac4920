"""`distlaunch predict EXPORT --data FUNCTION`: every kind of data, with the `data.map` of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.base.protocol import MODULES_FOLDER
from distlaunch.base.run_dir import RunDir
from distlaunch.config.read.load import dump_config
from distlaunch.config.run import RunConfig
from distlaunch.jobs import predict_export as launcher
from distlaunch.serving.exported_model import ExportedModel, Spec
from distlaunch.tasks import predict_export

pytestmark = pytest.mark.usefixtures("virtual_devices")
MODEL = ExportedModel("keras", (Spec("x", "float32", (None, 2)),), None, "x", lambda values: values)
ROWS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
DATA = """
from pathlib import Path
import keras
import numpy as np
import tensorflow as tf
from distlaunch.data import csv

X = np.arange(10, dtype="float32").reshape(5, 2)
Y = np.zeros(5)

class Rows:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index >= 5:
            raise IndexError(index)
        return X[index], Y[index]

class Broken(Rows):
    def __getitem__(self, index):
        if index == 3:
            raise KeyError("no such photo")
        return super().__getitem__(index)

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[2 * index:2 * index + 2], Y[2 * index:2 * index + 2]

class Endless(Batches):
    num_batches = None

def arrays():
    return X, Y

def pipeline():
    return tf.data.Dataset.from_tensor_slices((X, Y))

def items():
    return {"train": arrays(), "validation": Rows()}

def table():
    return csv(str(Path(__file__).with_name("rows.csv")), label="y")

def batches():
    return Batches()

def endless():
    return Endless()

def broken():
    return Broken()

def twice(x, y):
    return 2 * x, y

def stacked(columns, y):
    return 2 * tf.stack([columns["a"], columns["b"]]), y
"""


def predict(file: Path, function: str, mapping: str | None = None) -> list[list[list[float]]]:
    reference = {"data": f"{file}:{function}", "map": mapping and f"{file}:{mapping}"}
    arguments = argparse.Namespace(**reference, split=None, batch_size=2)
    return [batch["x"].tolist() for batch in predict_export._dataset_batches(arguments, MODEL)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "predicted_data.py"
    path.write_text(DATA)
    return path


@pytest.mark.parametrize("function", ["arrays", "pipeline", "items", "batches"])
def test_each_kind_is_read_in_its_order(file: Path, function: str) -> None:
    assert predict(file, function) == [ROWS[:2], ROWS[2:4], ROWS[4:]]


@pytest.mark.usefixtures("index_cache")
@pytest.mark.parametrize(
    ("function", "mapping"), [("arrays", "twice"), ("pipeline", "twice"), ("items", "twice"), ("table", "stacked")]
)
def test_the_map_of_a_run_is_applied(file: Path, function: str, mapping: str) -> None:
    file.with_name("rows.csv").write_text("a,b,y\n" + "".join(f"{a},{b},0\n" for a, b in ROWS))
    doubled = (2 * np.array(ROWS)).tolist()
    assert predict(file, function, mapping) == [doubled[:2], doubled[2:4], doubled[4:]]


@pytest.mark.parametrize(
    ("function", "mapping", "message"),
    [
        ("broken", None, r"\(train\): example 3 cannot be read: KeyError: 'no such photo'"),
        ("endless", None, r"\(train\): the dataset repeats forever"),
        ("batches", "twice", r"\(train\): data\.map: got .*:twice, but Batches gives batches, not single examples"),
    ],
)
def test_errors_name_the_cause(file: Path, function: str, mapping: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=f"^--data .*:{function} {message}"):
        predict(file, function, mapping)


def _run(folder: Path, **data: Any) -> RunDir:
    run = RunDir(folder / "runs" / "job")
    run.path.mkdir(parents=True)
    raw = {"model": {"function": "gone.py:model"}, "data": {"function": "gone.py:data", "global_batch": 2, **data}}
    run.config.write_text(dump_config(RunConfig.model_validate(raw)))
    return run


def test_a_run_gives_its_map(file: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    run = _run(tmp_path, map=f"{file}:twice")
    assert launcher._map_of(str(run.path), notes.append) == (["--map", f"{file}:twice"], {})
    assert notes == [f"data.map of {run.path} is applied to each example of --data: {file}:twice"]
    run.write_json(run.environment, {"modules_folder": str(tmp_path)})
    run.config.write_text(run.config.read_text().replace(f"{file}:twice", "predicted_data:twice"))
    found = launcher._map_of(str(run.path), notes.append)
    assert found == (["--map", "predicted_data:twice"], {MODULES_FOLDER: str(tmp_path)})
    run.config.write_text(run.config.read_text().replace("predicted_data:twice", "gone.py:twice"))
    with pytest.raises(ConfigError, match=r"^data\.map: no such file: gone\.py"):
        launcher._map_of(str(run.path), notes.append)


def test_a_run_without_map_needs_none_of_its_code(tmp_path: Path) -> None:
    assert launcher._map_of(str(_run(tmp_path).path), pytest.fail) == ([], {})
    assert launcher._map_of(str(tmp_path), pytest.fail) == ([], {})
