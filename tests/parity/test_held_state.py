"""Optimizers and variables that a model holds outside of Keras's lists are part of its state."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.base.errors import CheckpointError
from distlaunch.config.strategies import MODELS, REFERENCE
from distlaunch.strategies.variables import optimizers_of, untracked_variables
from tests.parity import optimizer_models
from tests.parity.optimizer_runs import Run, difference, fitted
from tests.strategies import IN_ONE_PROCESS, WITH_REPLICAS_HERE
from tests.warm import run_module

HERE = "tests.parity.test_held_state"
KINDS = ("dict", "sub-models", "object", "attributes")


def _nothing(model: Any) -> None: ...


def parts(kind: str, folder: Path, places: Collection[str] = KINDS) -> Any:
    """Adam and momentum of optimizers that no step has built yet, wherever they are kept."""
    found = {}
    for place in places:
        run = Run(kind, folder / place, "parts", kind=place)
        run.train(1)
        run.train(3)
        found[place] = difference(run.weights, fitted(optimizer_models.parts(place), (3, _nothing)))
    return found


def counting(kind: str, folder: Path) -> Any:
    run = Run(kind, folder, "counting")
    run.train(1)
    session = run.train(3)
    theirs = optimizer_models.counting()
    weights = fitted(theirs, (3, _nothing))
    exported = session.trained_model()
    steps = [float(one.kept["steps"].numpy()) for one in (theirs, exported)]
    return {
        "weights": difference(run.weights, weights),
        "steps": abs(steps[0] - steps[1]),
        "none": 1e-9 * (not steps[0]),
    }


def dict_and_object(kind: str, folder: Path) -> Any:
    return parts(kind, folder, ("dict", "object"))


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("one_device", "dict_and_object"),
        *(
            pytest.param(kind, "parts", marks=pytest.mark.slow)
            for kind in IN_ONE_PROCESS
            if MODELS[kind].backend == "tensorflow"
        ),
    ],
)
def test_a_resume_keeps_what_a_model_holds(kind: str, places: str) -> None:
    names = [places, *(["counting"] if kind in (REFERENCE, *WITH_REPLICAS_HERE) else [])]
    arguments = [kind, *(f"{HERE}.{name}" for name in names)]
    out = run_module("tests.parity.optimizer_runs", arguments, backend=MODELS[kind].backend, deadline_s=400)
    for name, values in json.loads(out.splitlines()[-1]).items():
        assert {key: value for key, value in values.items() if not value < 1e-5} == {}, name


class Holder:
    """An object of the user's."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


@pytest.mark.usefixtures("virtual_devices")
def test_each_is_found_once_at_any_depth() -> None:
    import tensorflow as tf

    adam, sgd, inner = keras.optimizers.Adam(), keras.optimizers.SGD(), keras.optimizers.Lion()
    model = optimizer_models.mlp()
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    layer = model.layers[0]
    layer.table = {"a": [tf.Variable([1.0, 2.0]), (adam, adam)]}
    model.more = Holder(deep=Holder(sgd=sgd, variable=tf.Variable(3), back=model), text=tf.Variable("no number"))
    assert optimizers_of(model) == [model.optimizer, sgd, adam]
    found = {name: np.asarray(variable).tolist() for name, variable in untracked_variables(model).items()}
    assert found == {"attribute/more/deep/variable": 3, "attribute/body/table/a/0": [1.0, 2.0]}


def _changed(tmp_path: Path, model: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    run = Run("one_device", tmp_path, model, **before)
    run.train(1)
    run.raw["model"]["args"] = after
    with pytest.raises(CheckpointError) as error:
        run.train(2)
    return str(error.value)


class Fewer(keras.Model):
    """Holds the given number of optimizers and variables."""

    def __init__(self, optimizers: int, variables: int) -> None:
        import tensorflow as tf

        super().__init__()
        self.net = optimizer_models.mlp()
        self.more = [keras.optimizers.SGD() for _ in range(optimizers)]
        self.plain = {f"v{index}": tf.Variable(1.0) for index in range(variables)}

    def call(self, x: Any) -> Any:
        return self.net(x)


def fewer(optimizers: int = 0, variables: int = 0) -> keras.Model:
    model = Fewer(optimizers, variables)
    model.compile("sgd", "mse")
    return model


@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"optimizers": 1}, {}, "it has values of 2 optimizers, but the model has 1"),
        ({}, {"optimizers": 2}, "it has values of 1 optimizers, but the model has 3"),
        ({"variables": 2}, {"variables": 1}, "the variable 'attribute/plain/v1', which the model does not have"),
        ({"variables": 1}, {"variables": 2}, "it does not have the variable 'attribute/plain/v1'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], after: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(optimizer_models, "fewer", fewer, raising=False)
    message = _changed(tmp_path, "fewer", before, after)
    assert words in message
    assert "the config has changed since in model.args." in message
