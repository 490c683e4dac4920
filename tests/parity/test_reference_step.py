"""The reference step of `loop: custom` computes the compiled loss as `fit` does, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from distlaunch.base.errors import ConfigError
from distlaunch.config.run import RunConfig
from distlaunch.patches.keras_functional_optimizer import make_functional
from distlaunch.strategies.mesh.functional_step import FunctionalStep, reference_loss
from distlaunch.strategies.variables import slot_variables
from distlaunch.training.steps.context import StepContext, per_example
from distlaunch.training.steps.functions import make_steps, reference_step
from tests.parity.attempts import losses_and_notices

pytestmark = pytest.mark.usefixtures("virtual_devices")
TOKENS = np.random.default_rng(0).integers(0, 5, (24, 6))
LABELS = np.random.default_rng(1).normal(size=(24, 6, 1)).astype("float32")
MESH = {"kind": "dtensor", "mesh": {"batch": 2}}


def model(masks: bool = False) -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(5, 3, mask_zero=masks)(tokens)
    return keras.Model(tokens, keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1), name="out")(x))


def data() -> dict[str, Any]:
    return {"train": (TOKENS, LABELS)}


def losses(folder: Path, loop: str, *, masks: bool = False, strategy: Any = None, **compiled: Any) -> list[float]:
    raw = {
        "model": {"function": f"{__name__}:model", "args": {"masks": masks}},
        "data": {"function": f"{__name__}:data", "global_batch": 8, "shuffle": False},
        "compile": {"optimizer": {"name": "SGD", "args": {"learning_rate": 0.1}}, "loss": "mse", **compiled},
        "train": {"loop": loop, "epochs": 2},
        "strategy": strategy or {"kind": "one_device"},
    }
    return losses_and_notices(folder / f"{loop}-{strategy}", [raw])[0]


class Scaled(keras.losses.Loss):
    """A loss of the user's that cannot be made again from `get_config`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.scale * ops.mean(ops.abs(y_true - y_pred), axis=-1)


class AddsRows(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.sum(x**2, axis=-1))
        return x


def squares(y_true: Any, y_pred: Any) -> Any:
    return ops.square(y_true - y_pred)


def _state(model: keras.Model) -> tuple[list[Any], ...]:
    groups = (model.trainable_variables, model.non_trainable_variables, slot_variables(model), model.metrics_variables)
    return tuple([tf.convert_to_tensor(each.value) for each in group] for group in groups)


def in_one_step(step: str, compiled: dict[str, Any], batch: Any, *, adds: bool, policy: str) -> list[np.ndarray]:
    """Return the loss of the first step, and the weights after it."""
    keras.utils.set_random_seed(0)
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    inputs = keras.Input((4,), dtype="float32")
    hidden = keras.layers.Dense(3, "tanh", dtype=policy)(inputs)
    hidden = AddsRows(dtype=policy)(hidden) if adds else hidden
    units = 1 if y.shape.rank == 1 and y.dtype.is_floating else 2
    model = keras.Model(inputs, keras.layers.Dense(units, dtype=policy, kernel_regularizer="l2")(hidden))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), **compiled})
    model.optimizer.build(model.trainable_variables)
    model.compute_loss(x, y, model(x), weights)  # creates the metrics
    context = StepContext(model, per_example(model))
    if step == "mesh":
        make_functional(model.optimizer)
        functional = FunctionalStep(model, reference_loss(model, context.per_example_loss))
        logs, (values, *_) = functional.train_step(_state(model), batch)
    else:
        logs = model.train_step(batch) if step == "fit" else reference_step(context, batch)
        values = model.trainable_variables
    return [np.asarray(each) for each in (logs["loss"], *values)]


X = np.random.default_rng(2).normal(size=(8, 4)).astype("float32")
Y = np.stack([X.sum(1) + 1, 30 * X[:, 0]], 1)
WEIGHTS = np.linspace(0, 2, 8, dtype="float32")
CASES: dict[str, tuple[dict[str, Any], Any, bool, str]] = {
    "arguments that get_config forgets": ({"loss": keras.losses.Huber(delta=20.0)}, (X, Y), False, "float32"),
    "a class without get_config": ({"loss": Scaled(5.0)}, (X, Y), False, "float32"),
    "a weight in a list": ({"loss": "mse", "loss_weights": [0.25]}, (X, Y), False, "float32"),
    "whole labels": ({"loss": squares}, (X, np.round(Y).astype("int64")), False, "float32"),
    "labels without the axis of the output": ({"loss": squares}, (X, Y[:, 0]), False, "float32"),
    "a weight for each row": ({"loss": "mse"}, (X, Y, WEIGHTS), False, "float32"),
    "a weight for each value": ({"loss": squares}, (X, Y, np.stack([WEIGHTS, WEIGHTS[::-1]], 1)), False, "float32"),
    "a loss for each row": ({"loss": keras.losses.MeanSquaredError()}, (X, Y), True, "float32"),
    "16 bits": ({"loss": "mse"}, (X, 1000 * Y), False, "mixed_bfloat16"),
    "64 bits": ({"loss": keras.losses.MeanSquaredError(dtype="float64")}, (X, Y), False, "float32"),
    "a name for three losses": ({"loss": "crossentropy"}, (X, np.arange(8) % 2), False, "float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_fit(name: str) -> None:
    compiled, arrays, adds, policy = CASES[name]
    batch = tuple(tf.constant(each) for each in arrays)
    expected = in_one_step("fit", compiled, batch, adds=adds, policy=policy)
    for step in ("custom", "mesh"):
        found = in_one_step(step, compiled, batch, adds=adds, policy=policy)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7, err_msg=step)


class UpdatesTwice(keras.Model):
    """A model whose step makes two updates; the second one, and a penalty, read the weights after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.out(self.dense(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        loss = 0.0
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True)) + tf.reduce_sum(self.out.kernel**2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.dense.bias.assign_add(0.5 * self.dense.bias)
        return {"loss": loss}


def test_a_step_on_a_mesh_updates_the_same_weights_twice() -> None:
    found = []
    for kind in ({"kind": "one_device"}, MESH):
        keras.utils.set_random_seed(0)
        model, batch = UpdatesTwice(), (tf.constant(X), tf.constant(Y))
        model(batch[0])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse")
        model.optimizer.build(model.trainable_variables)
        model.compute_loss(*batch, model(batch[0]))
        raw = {"model": {"function": "unused:unused"}, "data": {"function": "unused:unused"}, "strategy": kind}
        steps = make_steps(RunConfig.model_validate(raw), model)
        if kind is MESH:
            make_functional(model.optimizer)
            logs, (values, *_) = steps.train(_state(model), batch)
        else:
            logs, values = steps.train(batch), model.trainable_variables
        found.append([np.asarray(each) for each in (logs["loss"], *values)])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("strategy", [None, MESH], ids=["one_device", "dtensor"])
def test_what_the_reference_step_does_not_compute_is_an_error(tmp_path: Path, strategy: Any) -> None:
    summed = {"name": "MeanSquaredError", "args": {"reduction": "sum"}}
    with pytest.raises(ConfigError, match="means over the batch, but the loss has the reduction 'sum'"):
        losses(tmp_path, "custom", strategy=strategy, loss=summed)
    with pytest.raises(ConfigError, match="the model masks positions of its output"):
        losses(tmp_path, "custom", strategy=strategy, masks=True)
    # a loss that is a function has no reduction
    assert losses(tmp_path, "custom", strategy=strategy, loss="mean_squared_error")
