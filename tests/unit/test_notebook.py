"""`distlaunch.notebook`: several trainings in one process, with code that is edited in between."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras")

from distlaunch import notebook  # noqa: E402
from distlaunch.base.errors import CheckpointError, DataError, DistlaunchError, UsageError  # noqa: E402
from distlaunch.base.event_files import read_events_of  # noqa: E402
from distlaunch.base.events import Notice  # noqa: E402
from distlaunch.base.run_dir import RunDir  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")

MINE = """\
import keras
import numpy as np
import notebook_helper

@keras.saving.register_keras_serializable("test_notebook")
class Scaled(keras.layers.Dense):
    SCALE = 3.0

    def call(self, x):
        return self.SCALE * super().call(x)

def model():
    return keras.Sequential([keras.layers.Input((1,)), Scaled(1, kernel_initializer="ones")])

def data():
    return np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 41:
            raise OSError("photo 41 is damaged")
        return np.ones(1, "float32"), np.zeros(1, "float32")

def rows():
    return Rows()
"""


def config_of(folder: Path, **keys: Any) -> dict[str, Any]:
    return {
        "model": {"function": f"{folder / 'mine.py'}:model"},
        "data": {"function": f"{folder / 'mine.py'}:data", "global_batch": 2},
        "compile": {"optimizer": {"name": "SGD", "args": {"learning_rate": 1e-30}}, "loss": "mse"},
        "train": {"epochs": 1},
        "strategy": {"kind": "one_device"},
        "runs_dir": str(folder / "runs"),
        **keys,
    }


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "notebook_helper", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "notebook_helper.py").write_text("VALUE = 1\n")
    return tmp_path


def warnings_of(run: Path) -> list[str]:
    events = read_events_of(RunDir(run).events, Notice)
    return [event.message for event in events if event.level == "warning" and "imported" in event.message]


def test_an_edited_file_is_loaded_again(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_of(project)
    first = notebook.train(config)
    assert first.history["loss"] == [9.0]
    # the same size, within the same second
    (project / "mine.py").write_text(MINE.replace("SCALE = 3.0", "SCALE = 2.0"))
    second = notebook.train(config)
    assert second.history["loss"] == [4.0]
    assert warnings_of(second.run_dir) == []
    # a module that this file imports stays as it is, which the run reports
    (project / "notebook_helper.py").write_text("VALUE = 2\n")
    capfd.readouterr()
    third = notebook.train(config)
    message = "notebook_helper.py has changed since this process imported it; "
    message += "this training uses the version that was imported; to use the new one, restart the kernel"
    assert warnings_of(third.run_dir) == [message]
    assert f"warning: {message}\n" in capfd.readouterr().out


def test_a_resume_lists_the_settings_that_have_changed(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notebook.train(config_of(project))
    notebook.train(config_of(project, resume="auto", train={"epochs": 2}, seed=3))
    line = "resuming runs/run; changed settings: seed: 0 -> 3, train.epochs: 1 -> 2\n"
    assert line in capfd.readouterr().out


def test_a_file_that_could_not_be_loaded_is_loaded_again(project: Path) -> None:
    flag = project / "flag"
    (project / "mine.py").write_text(f"import os\nassert os.path.exists({str(flag)!r})\n{MINE}")
    with pytest.raises(AssertionError):
        notebook.train(config_of(project))
    flag.touch()
    assert notebook.train(config_of(project)).history["loss"] == [9.0]


def _fail(*_: object, **__: object) -> None:
    raise DistlaunchError("the model cannot be saved")


def test_problems_are_reported_as_by_the_command(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distlaunch.training.session.export_all", _fail)
    data = {"function": f"{project / 'mine.py'}:rows", "global_batch": 32, "on_error": "skip"}
    result = notebook.train(config_of(project, data=data, export=["keras"], tracking=["mlflow"]))
    assert (result.status, result.export_errors) == ("done", ("the model cannot be saved",))
    out = capfd.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert lines[0] == (
        "warning: tracking: a training in a notebook sends nothing to trackers; "
        "afterwards, `distlaunch track runs/run` sends its values"
    )
    assert any(line.startswith("warning: data: example 41 cannot be read: OSError: photo 41") for line in lines), lines
    assert [line for line in lines if line.endswith("; it is left out")]
    assert lines[-1] == (
        "warning: the export failed: the model cannot be saved; the run is done; once that is fixed, "
        "run `distlaunch export runs/run`"
    )


def test_an_example_that_cannot_be_read_is_named(project: Path) -> None:
    data = {"function": f"{project / 'mine.py'}:rows", "global_batch": 32}
    config = config_of(project, data=data)
    with pytest.raises(DataError, match=r"^data: example 41 cannot be read: OSError: photo 41 is damaged"):
        notebook.train(config)


def test_a_refused_or_failed_resume_leaves_a_finished_run_finished(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(notebook.train(config_of(project)).run_dir)
    text = run.config.read_text(encoding="utf-8")
    with pytest.raises(UsageError, match=r"run is finished, and this config would give other numbers: compile\.loss"):
        notebook.train(run.path, ["compile.loss=mae"])
    (project / "mine.py").write_text(MINE.replace("Scaled(1,", "Scaled(2,"))
    with pytest.raises(CheckpointError):
        notebook.train(run.path, ["train.epochs=2"])
    assert run.finished()
    assert run.config.read_text(encoding="utf-8") == text
    assert "no step was made: restored the earlier runs/run/config.yaml\n" in capfd.readouterr().out
