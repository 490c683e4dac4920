"""Runs of several attempts in one process, and what they end with.

`python -m tests.parity.optimizer_runs KIND NAME...` prints the findings of some cases under one strategy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from distlaunch.config.strategies import MODELS
from tests.strategies import IN_ONE_PROCESS

HERE = "tests.parity.optimizer_models"
STRATEGIES: dict[str, dict[str, Any]] = {
    **IN_ONE_PROCESS,
    "jax": {"strategy": {"kind": "jax", "mesh": {"batch": 2, "model": 2}, "layout": "auto"}},
}


def chosen(*fast: str, among: Collection[str] = tuple(STRATEGIES)) -> list[Any]:
    """Return parameters for strategies; those that are not fast run with `-m slow`."""
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in among]


class Run:
    """A run of one strategy in a folder, whose attempts are made one after the other.

    Attributes:
        notices: of all attempts.
        weights: by name, after the last attempt.
    """

    def __init__(self, strategy: str, folder: Path, model: str, **args: Any) -> None:
        self._folder, self.notices = folder, []
        self.raw: dict[str, Any] = {
            "model": {"function": f"{HERE}:{model}", "args": args},
            "data": {"function": f"{HERE}:data", "global_batch": 24, "shuffle": False},
            "train": {"epochs": 1, "log_every_steps": 1},
            **STRATEGIES[strategy],
        }
        self.weights: list[Any] = []

    def train(self, epochs: int, stop_after: int | None = None, **sections: Any) -> Any:
        """Make an attempt, and return its session; a section that is given replaces that of the config."""
        from distlaunch.base.process import Process
        from distlaunch.base.run_dir import RunDir
        from distlaunch.cluster.spec import Task
        from distlaunch.config.run import RunConfig
        from distlaunch.training.session import Session

        steps: list[Any] = []

        def emit(event: Any) -> None:
            if type(event).__name__ == "Notice":
                self.notices.append(event.message)
            if type(event).__name__ == "StepsDone":
                steps.append(event.logs["loss"])

        self.raw.update(sections)
        self.raw["train"] = {**self.raw["train"], "epochs": epochs}
        if stop_after is not None:
            self.raw["train"]["steps_per_call"] = 1
        config = RunConfig.model_validate(self.raw)
        stop = lambda: stop_after is not None and len(steps) >= stop_after  # noqa: E731
        session = Session.build(config, RunDir(self._folder), Task("worker", 0), Process(emit, stop))
        session.run_training(check_exports=False)
        state = session.program.snapshot()
        self.weights = [value for name, value in state.items() if name.startswith("model/") and "seed" not in name]
        self.losses = steps
        return session


def fitted(model: Any, *epochs: tuple[int, Callable[[Any], None]]) -> list[Any]:
    """Return the weights that Keras's own `fit` ends with.

    Args:
        epochs: numbers of epochs, each with what is done to the model before them.
    """
    import keras

    from tests.parity.optimizer_models import BATCH, data

    (x, y), validation = data()["train"], data()["validation"]
    for number, prepare in epochs:
        prepare(model)
        model.fit(x, y, batch_size=BATCH, epochs=number, shuffle=False, validation_data=validation, verbose=0)
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights if "seed" not in weight.path]


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """Return the largest deviation, relative to the largest value of each array; 1e-5 is 1e-6 where that is 0."""
    import numpy as np

    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(a - b).max() / (np.abs(b).max() + 0.1)) for a, b in pairs)


def main() -> None:
    from distlaunch.config.backend import choose_backend
    from tests.parity.train_jobs import prepare_devices

    kind, *names = sys.argv[1:]
    choose_backend(MODELS[kind].backend)
    if kind != "parameter_server":
        prepare_devices(4)
    import importlib

    found = {}
    for name in names:
        module, _, case = name.rpartition(".")
        with tempfile.TemporaryDirectory() as folder:
            found[name] = getattr(importlib.import_module(module), case)(kind, Path(folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
