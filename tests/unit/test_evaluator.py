"""The evaluator evaluates the values that a checkpoint has in the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import Evaluated, Event, RunEnded
from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.training.evaluator import Evaluator
from distlaunch.training.session import Session

pytestmark = pytest.mark.usefixtures("virtual_devices")
X = np.linspace(-1, 1, 12, dtype="float32")[:, None]
ENDED = RunEnded(status="done", step=3, epochs_done=1, seconds=1.0, logs={})


def model() -> keras.Model:
    return keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])


def data() -> dict[str, Any]:
    return {"train": (X, X), "validation": (X, X)}


def session(run: RunDir) -> Session:
    raw = {
        "model": {"function": f"{__name__}:model"},
        "data": {"function": f"{__name__}:data", "global_batch": 4},
        "compile": {"optimizer": "sgd", "loss": "mse"},
        "train": {"epochs": 1},
        "validation": {},
    }
    return Session.build(
        RunConfig.model_validate(raw), run, Task("worker", 0), Process(lambda event: None, lambda: False)
    )


def test_a_checkpoint_that_gets_other_values_is_evaluated_again(tmp_path: Path) -> None:
    run, found = RunDir(tmp_path), list[Event]()
    built = session(run)
    built.run_training()
    run.events.parent.mkdir(exist_ok=True)
    EventWriter(run.events, attempt=0, task="launcher").write(ENDED)

    def losses(evaluator: Evaluator) -> list[float]:
        found.clear()
        evaluator.follow(threading.Event())
        return [event.logs["loss"] for event in found if isinstance(event, Evaluated)]

    evaluator = Evaluator(built, run, 0, found.append)
    assert len(losses(evaluator)) == 1
    assert losses(evaluator) == []
    store = built.store
    saved = store.load(3)
    store.save(saved.state, saved.progress, saved.config)
    assert losses(evaluator) == [], "the same values"
    weight = next(name for name in saved.state if name.endswith("kernel"))
    store.save({**saved.state, weight: np.array([[3.0]], np.float32)}, saved.progress, saved.config)
    assert losses(evaluator) == [pytest.approx(4 * float(np.mean(X**2)))]
