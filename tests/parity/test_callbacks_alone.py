"""A callback predicts or evaluates in its own process only, and does not change training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras
import pytest

from distlaunch import task
from distlaunch.cluster.tf_config import ThisTask
from distlaunch.config.run import Callback as CallbackConfig
from distlaunch.config.strategies import MODELS
from distlaunch.training.callbacks import hints_on_tasks
from tests.parity.optimizer_runs import Run, chosen, difference, fitted
from tests.warm import run_module

HERE = "tests.parity.test_callbacks_alone"


def judging(kind: str, folder: Path) -> Any:
    import numpy as np

    from tests.parity import optimizer_models
    from tests.parity.optimizer_models import Judges

    run = Run(kind, folder, "nested")
    callback = {"name": "tests.parity.optimizer_models:Judges", "tasks": "chief"}
    run.train(3, train={"callbacks": [callback]})
    ours, Judges.seen = Judges.seen, []
    model = optimizer_models.nested()
    # by itself, Keras's `evaluate` within an epoch would begin the metrics of training anew

    class Outside(Judges):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kept = [(one, np.array(one.value)) for metric in self.model.metrics for one in metric.variables]
            super().on_train_batch_end(batch, logs)
            for one, value in kept:
                one.assign(value)

    (x, y), validation = optimizer_models.data()["train"], optimizer_models.data()["validation"]
    model.fit(
        x, y, batch_size=optimizer_models.BATCH, epochs=3, shuffle=False, validation_data=validation, verbose=0,
        callbacks=[Outside()],
    )  # fmt: skip
    seen = Judges.seen
    theirs = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    return {
        "weights": difference(run.weights, theirs),
        "seen": difference([np.array(ours)], [np.array(seen)]),
        "untouched": difference(run.weights, fitted(optimizer_models.nested(), (3, lambda model: None))),
    }


@pytest.mark.parametrize("kind", chosen("mirrored"))
def test_a_callback_computes_alone(kind: str) -> None:
    if kind == "jax":
        pytest.importorskip("jax")
    out = run_module("tests.parity.optimizer_runs", [kind, f"{HERE}.judging"], backend=MODELS[kind].backend)
    for values in json.loads(out.splitlines()[-1]).values():
        assert {key: value for key, value in values.items() if not value < 1e-5} == {}


@pytest.mark.parametrize(
    ("cluster", "own", "expected"),
    [
        (None, None, ThisTask("worker", 0, is_chief=True, num_workers=1)),
        ({"worker": ["a:1", "b:1", "c:1"]}, ("worker", 2), ThisTask("worker", 2, is_chief=False, num_workers=3)),
        ({"chief": ["a:1"], "worker": ["b:1"]}, ("chief", 0), ThisTask("chief", 0, is_chief=True, num_workers=2)),
        (
            {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]},
            ("ps", 0),
            ThisTask("ps", 0, is_chief=False, num_workers=1),
        ),
    ],
)
def test_which_task_a_process_is(monkeypatch: pytest.MonkeyPatch, cluster: Any, own: Any, expected: ThisTask) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if cluster is not None:
        value = json.dumps({"cluster": cluster, "task": {"type": own[0], "index": own[1]}})
        monkeypatch.setitem(os.environ, "TF_CONFIG", value)
    assert task() == expected


class Logs(keras.callbacks.Callback):
    """A callback of a user's."""


def test_a_callback_on_several_tasks_is_named() -> None:
    configs = [CallbackConfig(name="TerminateOnNaN", args={}), CallbackConfig(name="mine.py:Logs", args={})]
    callbacks = [keras.callbacks.TerminateOnNaN(), Logs()]
    [hint] = hints_on_tasks(configs, callbacks, 3)
    assert hint.startswith(
        "train.callbacks[1] (Logs) runs on each of the 3 tasks; add `tasks: chief` if it writes files or prints"
    )
    assert hints_on_tasks(configs, callbacks, 1) == []
    decided = [configs[0], CallbackConfig(name="mine.py:Logs", args={}, tasks="all")]
    assert hints_on_tasks(decided, callbacks, 3) == []
