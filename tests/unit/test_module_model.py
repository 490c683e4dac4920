"""A tf.Module as a model: which variables it has, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from distlaunch.layouts import with_layout  # noqa: E402
from distlaunch.strategies.mesh.layout import choose_layouts  # noqa: E402
from distlaunch.strategies.module_model import ModuleModel  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")


class Layer(tf.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.ones([size, size]))
        self.seen = tf.Variable(0.0, trainable=False)

    def __call__(self, x: Any) -> Any:
        return x @ self.weight


class Tied(tf.Module):
    """Variables in a list, in a dict, in a module within a list, and one with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [Layer(2), Layer(2)]
        self.scales = {"a": tf.Variable([2.0, 2.0])}
        self.output = self.layers[0].weight

    def __call__(self, x: Any, training: bool = False) -> Any:
        for layer in self.layers:
            x = layer(x)
        if training:
            self.layers[1].seen.assign_add(1.0)
        return tf.matmul(x * self.scales["a"], self.output)


def test_every_variable_is_replaced_once_and_named_by_its_place() -> None:
    module = Tied()
    x = tf.constant([[1.0, 2.0]])
    expected = module(x).numpy()
    model = ModuleModel(module)
    assert sorted(variable.path for variable in model.trainable_variables) == [
        "layers/1/weight",
        "output",  # as well layers/0/weight: the first place that TensorFlow finds names it
        "scales/a",
    ]
    assert sorted(variable.path for variable in model.non_trainable_variables) == ["layers/0/seen", "layers/1/seen"]
    np.testing.assert_array_equal(model(x), expected)
    assert module.output is module.layers[0].weight
    assert module.trainable_variables == (), "no variable of TensorFlow is left"


def test_training_reaches_the_module_and_what_it_assigns_the_model() -> None:
    model = ModuleModel(Tied())
    for training in (False, True):
        model(tf.ones([1, 2]), training=training)
        assert float(model.module.layers[1].seen) == float(training)


def test_layouts_in_the_modules_code() -> None:
    module = Tied()
    with_layout(module.layers[1], weight=[None, "model"])
    layouts, _ = choose_layouts({}, ModuleModel(module), {"batch": 1, "model": 2})
    assert layouts == {"layers/1/weight": (None, "model")}
