"""A resume with changed optimizer settings uses the new ones, and keeps the state of all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distlaunch.config.strategies import MODELS
from tests.parity.optimizer_runs import STRATEGIES, Run, difference, fitted
from tests.warm import run_module

HERE = "tests.parity.test_resume_settings"


def _nothing(model: Any) -> None: ...


def _rate(value: float) -> Any:
    def prepare(model: Any) -> None:
        model.optimizer.learning_rate = value

    return prepare


def _model(run: Run, **args: Any) -> dict[str, Any]:
    return {"model": {**run.raw["model"], "args": args}}


def rate(kind: str, folder: Path) -> Any:
    from tests.parity.optimizer_models import compiled

    run = Run(kind, folder, "compiled", rate=0.05, momentum=0.9)
    run.train(2)
    run.train(4, **_model(run, rate=0.002, momentum=0.9))
    theirs = fitted(compiled(rate=0.05, momentum=0.9), (2, _nothing), (2, _rate(0.002)))
    return difference(run.weights, theirs), run.notices


def unchanged_rate(kind: str, folder: Path) -> Any:
    """A callback has changed the learning rate, and the resumed run keeps it."""
    from tests.parity.optimizer_models import compiled

    run = Run(kind, folder, "compiled", rate=0.05, momentum=0.9)
    callbacks = [{"name": "tests.parity.optimizer_models:Doubles"}]
    run.train(2, train={"callbacks": callbacks})
    run.train(3, train={"callbacks": []})
    theirs = fitted(compiled(rate=0.05, momentum=0.9), (3, _rate(0.25)))
    return difference(run.weights, theirs), run.notices


def momentum(kind: str, folder: Path) -> Any:
    from tests.parity.optimizer_models import compiled

    def prepare(model: Any) -> None:
        model.optimizer.momentum = 0.3
        model.make_train_function(force=True)

    run = Run(kind, folder, "compiled", rate=0.05, momentum=0.9)
    run.train(2)
    run.train(4, **_model(run, rate=0.05, momentum=0.3))
    theirs = fitted(compiled(rate=0.05, momentum=0.9), (2, _nothing), (2, prepare))
    return difference(run.weights, theirs), run.notices


def _decay() -> Any:
    import keras

    return keras.optimizers.schedules.InverseTimeDecay(0.1, 4, 0.8)


DECAY = {"name": "InverseTimeDecay", "args": {"initial_learning_rate": 0.1, "decay_steps": 4, "decay_rate": 0.8}}


def _sgd(rate: Any, **args: Any) -> dict[str, Any]:
    return {"compile": {"optimizer": {"name": "SGD", "args": {"learning_rate": rate, **args}}, "loss": "mse"}}


def schedule(kind: str, folder: Path) -> Any:
    """From a number to a schedule, which begins at the step that was reached."""
    from tests.parity.optimizer_models import compiled

    run = Run(kind, folder, "mlp")
    run.train(2, **_sgd(0.02, momentum=0.9))
    run.train(4, **_sgd(DECAY, momentum=0.9))

    def prepare(model: Any) -> None:
        model.optimizer.learning_rate = _decay()
        model.make_train_function(force=True)

    theirs = fitted(compiled(rate=0.02, momentum=0.9), (2, _nothing), (2, prepare))
    return difference(run.weights, theirs), run.notices


def back_to_a_number(kind: str, folder: Path) -> Any:
    from tests.parity.optimizer_models import compiled

    run = Run(kind, folder, "mlp")
    run.train(2, **_sgd(DECAY))
    run.train(4, **_sgd(0.02))

    def prepare(model: Any) -> None:
        # Keras refuses to go back: without momentum a fresh optimizer is the same
        model.compile(type(model.optimizer)(0.02), "mse")

    return difference(run.weights, fitted(compiled(rate=_decay()), (2, _nothing), (2, prepare))), run.notices


def other_class(kind: str, folder: Path) -> Any:
    """Slots that are gone are named; the new optimizer starts like one that has made no update, as its bias shows."""
    from tests.parity.optimizer_models import compiled

    run = Run(kind, folder, "compiled", rate=0.02, momentum=0.9)
    run.train(2)
    run.train(3, **_model(run, rate=0.01, name="Adam"))
    trained = fitted(compiled(rate=0.02, momentum=0.9), (2, _nothing))
    fresh = compiled(rate=0.01, name="Adam")

    def prepare(model: Any) -> None:
        for weight, value in zip(model.weights, trained, strict=True):
            weight.assign(value)

    return difference(run.weights, fitted(fresh, (1, prepare))), run.notices


def chained(kind: str, folder: Path) -> Any:
    """Each attempt is compared with the one that wrote its checkpoint."""
    from tests.parity.optimizer_models import compiled

    run = Run(kind, folder, "compiled", rate=0.05)
    run.train(1)
    run.train(2, **_model(run, rate=0.01))
    run.train(3)
    run.train(4, **_model(run, rate=0.05))
    theirs = fitted(compiled(rate=0.05), (1, _nothing), (2, _rate(0.01)), (1, _rate(0.05)))
    return difference(run.weights, theirs), run.notices


WORDS = {
    "rate": "resumed SGD: learning rate 0.002 from model.function (the checkpoint's attempt began with 0.05)",
    "unchanged_rate": "resumed SGD: learning rate 0.25 from the checkpoint (training had changed it from 0.05)",
    "momentum": "learning rate 0.05, as in the checkpoint; momentum 0.3 from model.function, instead of 0.9",
    "schedule": "at update 8, from compile.optimizer, instead of 0.02",
    "back_to_a_number": "resumed SGD: learning rate 0.02 from compile.optimizer, instead of InverseTimeDecay(",
    "other_class": "Adam instead of SGD; 12 variables not in the checkpoint, initialized",
    "chained": "resumed SGD: learning rate 0.05 from model.function (the checkpoint's attempt began with 0.01)",
}


IN_CI = ("unchanged_rate", "momentum", "schedule", "other_class")


@pytest.mark.parametrize(
    ("kind", "names"),
    [("one_device", IN_CI), *(pytest.param(kind, tuple(WORDS), marks=pytest.mark.slow) for kind in STRATEGIES)],
)
def test_new_settings_count_and_others_go_on(kind: str, names: tuple[str, ...]) -> None:
    if kind == "jax":
        pytest.importorskip("jax")
    arguments = [kind, *(f"{HERE}.{name}" for name in names)]
    out = run_module("tests.parity.optimizer_runs", arguments, backend=MODELS[kind].backend, deadline_s=400)
    found = json.loads(out.splitlines()[-1])
    assert {name: value for name, (value, _) in found.items() if not value < 1e-5} == {}
    for name in names:
        words, notices = WORDS[name], found[f"{HERE}.{name}"][1]
        assert any(words in notice for notice in notices), (name, notices)


def _overwritten(folder: Path, callback: dict[str, Any]) -> list[str]:
    run = Run("one_device", folder, "compiled", rate=0.05)
    run.train(1)
    run.train(2, **_model(run, rate=0.01), train={"callbacks": [callback]})
    return run.notices


@pytest.mark.usefixtures("virtual_devices")
def test_a_callback_that_overwrites_the_new_rate_is_named(tmp_path: Path) -> None:
    notices = _overwritten(tmp_path, {"name": "tests.parity.optimizer_models:Doubles"})
    assert "Doubles has replaced the new learning rate 0.01 with 0.25; change the callback's settings" in notices
    assert not any("overwritten" in notice for notice in _overwritten(tmp_path / "b", {"name": "TerminateOnNaN"}))
