"""`distlaunch.notebook`: several trainings in one process, with code that is edited in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras")

from distlaunch import notebook  # noqa: E402
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


def test_a_file_that_could_not_be_loaded_is_loaded_again(project: Path) -> None:
    flag = project / "flag"
    (project / "mine.py").write_text(f"import os\nassert os.path.exists({str(flag)!r})\n{MINE}")
    with pytest.raises(AssertionError):
        notebook.train(config_of(project))
    flag.touch()
    assert notebook.train(config_of(project)).history["loss"] == [9.0]
