"""Tests of what `verify` records about the layers of a model, and of how it calls layers as if not in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from distlaunch.config.run import Data  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402
from distlaunch.strategies.module_model import ModuleModel  # noqa: E402
from distlaunch.strategies.variables import metric_results, named_metrics  # noqa: E402
from distlaunch.training.trials.inspection import (  # noqa: E402
    depends_on_other_rows,
    draws_random_numbers,
    gradient_norms,
    norms_by_variable,
    stop_training_of,
    watch_gradients,
)
from distlaunch.training.trials.layer_facts import LayerFacts  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
layers = keras.layers
X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Block(layers.Layer):
    """A layer of the user's that holds others, and computes the second first."""

    def __init__(self) -> None:
        super().__init__(name="block")
        self.after, self.before = layers.Dense(3, name="after"), layers.Dense(3, name="before")

    def call(self, x: Any) -> Any:
        return self.after(self.before(x))


class FixedMetrics(keras.Model):
    """Its list of metrics is a fixed one, as in Keras's examples of GANs."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Block(), layers.RNN(layers.GRUCell(2, name="cell"), name="out")
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.out(self.block(x)[:, None, :])


def read(model: Any, record: LayerFacts) -> dict[str, list[float]]:
    values = {name: np.asarray(variable.value) for name, variable in named_metrics(model).items()}
    return record.read(values)


def test_layers_are_recorded_in_the_order_in_which_they_are_computed() -> None:
    model = FixedMetrics()
    model(X)
    expected = np.asarray(model.block(X))
    record = LayerFacts(model)
    model(X)
    found = read(model, record)
    assert list(found) == ["before", "after", "block", "out"], "the cell computes in a loop of its own"
    number, total, magnitudes, squares, _ = found["block"]
    assert number == expected.size
    assert [total, magnitudes, squares] == pytest.approx(
        [expected.sum(), np.abs(expected).sum(), np.square(expected).sum()], rel=1e-5
    )
    assert set(metric_results(model)) == {"loss"}, "nothing is added to what the user sees"
    assert type(model).__name__ == "FixedMetrics"


def test_facts_of_parts_of_a_batch_add_up() -> None:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, name="same"), keras.Sequential([layers.ReLU()])])
    record = LayerFacts(model)
    model(X)
    whole = read(model, record)
    model.reset_metrics()
    for part in (X[:2], X[2:]):
        model(part)
    parts = read(model, record)
    assert list(parts) == list(whole)
    assert np.allclose(list(parts.values()), list(whole.values()), rtol=1e-5)


def test_statistics_of_parts_of_a_batch_show_though_mean_and_variance_are_the_same() -> None:
    model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(name="norm", epsilon=1e-9)])
    record = LayerFacts(model)
    model(X, training=True)
    (whole,) = read(model, record).values()
    model.reset_metrics()
    for part in (X[:3], X[3:]):
        model(part, training=True)
    (parts,) = read(model, record).values()
    assert parts[3] == pytest.approx(whole[3], rel=1e-5)
    assert parts[4] != pytest.approx(whole[4], rel=1e-2)


def test_layers_are_called_as_if_not_in_training() -> None:
    model = keras.Sequential(
        [layers.Input((4,)), layers.Dropout(0.5, name="drop"), layers.BatchNormalization(name="norm")]
    )
    still = np.asarray(model(X, training=False))
    path = model.layers[1].moving_mean.path
    assert not np.allclose(model(X, training=True), still)
    stop_training_of(model, ["drop", path])
    assert np.allclose(model(X, training=True), np.asarray(model(X, training=False)))
    model.layers[1](X, True)
    assert [type(layer).__name__ for layer in model.layers] == ["Dropout", "BatchNormalization"]


class Doubling(tf.Module):
    def __call__(self, x: Any, training: bool = False) -> Any:
        return 2 * x if training else x


class Outer(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubling()

    def __call__(self, x: Any, training: bool = False) -> Any:
        return self.inner(x, training)


def test_modules_are_called_as_if_not_in_training() -> None:
    outer = Outer()
    model = ModuleModel(outer)
    assert np.allclose(outer.inner(X, training=True), 2 * X)
    stop_training_of(model, ["Doubling"])
    assert np.allclose(outer.inner(X, training=True), X)
    assert np.allclose(outer.inner(X, True), X)


def test_a_gradient_is_known_of_each_variable() -> None:
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, name="a"), layers.Dense(1, name="b")])
    model.compile(optimizer="sgd", loss="mse")
    model.optimizer.build(model.trainable_variables)
    watch_gradients(model)
    gradients = [keras.ops.ones_like(variable) * 2 for variable in model.trainable_variables]
    gradients[0] = None
    model.optimizer.apply(gradients, model.trainable_variables)
    norms = norms_by_variable(model)
    assert list(norms) == [variable.path for variable in model.trainable_variables]
    assert list(norms.values()) == pytest.approx([0.0, 2 * 3**0.5, 2 * 3**0.5, 2.0])
    assert gradient_norms(model) == pytest.approx([np.linalg.norm(list(norms.values()))])


def test_what_draws_random_numbers() -> None:
    found = [layers.GRUCell(2, recurrent_dropout=0.1), layers.Dropout(0.1), layers.RandomFlip()]
    assert all(map(draws_random_numbers, found))
    assert not any(map(draws_random_numbers, [layers.GRUCell(2), layers.Dropout(0.0), layers.Dense(2)]))


def largest_error(y: Any, predictions: Any) -> Any:
    return keras.ops.max(keras.ops.abs(y - predictions))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (keras.losses.MeanSquaredError(), ""),
        (keras.losses.MeanSquaredError(reduction="sum"), ""),
        (largest_error, "loss"),
    ],
    ids=["mean", "sum", "largest"],
)
def test_losses_that_combine_rows(loss: Any, expected: str) -> None:
    """Replicas compute means and sums over rows exactly."""
    data = Data.model_validate({"function": "unused:unused", "global_batch": 5})
    source = make_split((X, X[:, :3]), data, seed=0, training=True).in_order().evaluation_source()
    model = keras.Sequential([layers.Input((4,)), layers.BatchNormalization(), layers.Dense(3)])
    model.compile(loss=loss)
    assert depends_on_other_rows(model, source) == expected
