"""A run ends with the averages of `use_ema`, as `fit` does; a resume continues from the weights of the last step."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from distlaunch.config.strategies import MODELS
from tests.parity.optimizer_runs import Run, difference, fitted
from tests.strategies import IN_ONE_PROCESS
from tests.warm import run_module

HERE = "tests.parity.test_final_weights"
MODELS_WITH_AVERAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("compiled", {"rate": 0.05, "momentum": 0.9, "use_ema": True, "ema_momentum": 0.6}),
    "frozen": ("compiled", {"name": "Adam", "rate": 0.01, "use_ema": True, "ema_momentum": 0.8, "frozen": True}),
    "several": ("two_in_one", {}),
    "scaled": ("scaled", {"use_ema": True, "ema_momentum": 0.5}),
    "overwriting": ("compiled", {"rate": 0.05, "use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 3}),
}


def _nothing(model: Any) -> None: ...


def final(kind: str, folder: Path, cases: Collection[str] = tuple(MODELS_WITH_AVERAGES)) -> Any:
    """The weights at the end, those that a resume trains on to, what `evaluate` sees, and what is exported."""
    import keras
    import numpy as np

    from tests.parity import optimizer_models

    found = {}
    for case in cases:
        name, args = MODELS_WITH_AVERAGES[case]
        if kind == "parameter_server" and case == "overwriting":
            continue  # refused by name
        make = getattr(optimizer_models, name)
        run = Run(kind, folder / case, name, **args)
        run.train(2)
        theirs = make(**args)
        found[f"{case}, end"] = difference(run.weights, fitted(theirs, (2, _nothing)))
        session = run.train(4)
        whole = make(**args)
        found[f"{case}, resumed"] = difference(run.weights, fitted(whole, (4, _nothing)))
        x, y = optimizer_models.data()["validation"]
        loss = whole.evaluate(x, y, verbose=0, batch_size=24)
        evaluated = session.evaluate_checkpoint("validation", None)["loss"]
        found[f"{case}, evaluated"] = abs(evaluated - loss) / loss
        exported = [keras.ops.convert_to_numpy(weight) for weight in session.trained_model().weights]
        found[f"{case}, exported"] = max(float(np.abs(a - b).max()) for a, b in zip(exported, run.weights, strict=True))
    return found


def one_of_them(kind: str, folder: Path) -> Any:
    return final(kind, folder, ("scaled",))


def interrupted(kind: str, folder: Path) -> Any:
    """A run that is stopped, and the best epoch: both have what validation judged."""
    from tests.parity.optimizer_models import compiled

    args: dict[str, Any] = {"rate": 0.05, "momentum": 0.5, "use_ema": True, "ema_momentum": 0.97}
    run = Run(kind, folder, "compiled", **args)
    best = {"every_epochs": 1, "best": {"metric": "val_loss", "mode": "min"}}
    run.train(3, stop_after=6, checkpoint=best)
    stopped = run.weights
    session = run.train(3)
    history = session.model.history.history["val_loss"]
    judged = session.evaluate_checkpoint("validation", "best")["loss"]
    model = compiled(**args)
    fitted(model, (3, _nothing))
    at_the_end = session.evaluate_checkpoint("validation", None)["loss"]
    resumed = difference(run.weights, fitted(compiled(**args), (3, _nothing)))
    return {
        "best": abs(judged - min(history)) / judged,
        "end is another": 0.0 if abs(at_the_end - judged) > 1e-3 else 1.0,
        "resumed": resumed,
        "stopped is no average": 0.0 if difference(stopped, run.weights) > 1e-3 else 1.0,
    }


@pytest.mark.parametrize(
    ("kind", "which"),
    [("one_device", "one_of_them"), *(pytest.param(kind, "final", marks=pytest.mark.slow) for kind in IN_ONE_PROCESS)],
)
def test_a_run_ends_with_the_averages_and_resumes_without(kind: str, which: str) -> None:
    if kind == "jax":
        pytest.importorskip("jax")
    arguments = [kind, f"{HERE}.{which}", *([] if kind == "parameter_server" else [f"{HERE}.interrupted"])]
    out = run_module("tests.parity.optimizer_runs", arguments, backend=MODELS[kind].backend, deadline_s=500)
    for values in json.loads(out.splitlines()[-1]).values():
        assert {key: value for key, value in values.items() if not value < 1e-5} == {}


@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize(
    ("kind", "on_epoch"),
    [("one_device", True), ("dtensor", False), pytest.param("one_device", False, marks=pytest.mark.slow)],
)
def test_swapped_averages_are_judged_and_found_again(tmp_path: Path, kind: str, on_epoch: bool) -> None:
    """Keras's SwapEMAWeights: validation judges the averages, and so does `evaluate` of the best epoch.

    A resume equals a run that was not interrupted: within an epoch, or after the end of a shorter run.
    """
    import keras

    from tests.parity.optimizer_models import BATCH, compiled, data

    args: dict[str, Any] = {"rate": 0.05, "momentum": 0.5, "use_ema": True, "ema_momentum": 0.9}
    swap = {"name": "SwapEMAWeights", "args": {"swap_on_epoch": on_epoch}}
    run = Run(kind, tmp_path, "compiled", **args)
    best = {"every_epochs": 1, "best": {"metric": "val_loss", "mode": "min"}}
    run.train(2 if on_epoch else 3, stop_after=None if on_epoch else 6, checkpoint=best, train={"callbacks": [swap]})
    session = run.train(3)
    judged = session.evaluate_checkpoint("validation", "best")["loss"]
    model = compiled(**args)
    (x, y), validation = data()["train"], data()["validation"]
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)]
    history = model.fit(
        x, y, batch_size=BATCH, epochs=3, shuffle=False, validation_data=validation, callbacks=callbacks, verbose=0
    )
    assert session.model.history.history["val_loss"] == pytest.approx(history.history["val_loss"], rel=1e-5)
    assert difference(run.weights, [weight.numpy() for weight in model.weights]) < 1e-5
    assert judged == pytest.approx(min(history.history["val_loss"]), rel=1e-5)
