"""On replicas, values that only the trace of a user's function shows are those of one device, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from keras import layers

from distlaunch.base.errors import ConfigError
from tests.corpus.models import Positions, compiled
from tests.parity.test_custom_on_replicas import ONE, TWO, compare, train

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.parity.test_untried_values"
ops: Any = keras.ops


class Table(layers.Layer):
    """Adds a row of a table to each position, without a layer of Keras's."""

    def build(self, input_shape: Any) -> None:
        self.table = self.add_weight(shape=(6, 1), name="table")

    def call(self, x: Any) -> Any:
        return x + ops.take(self.table, ops.arange(6), axis=0)[:, 0]


class Added(layers.Layer):
    """Adds a loss by a function that a search of its class does not see."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def call(self, x: Any) -> Any:
        add(self, x)
        return x


def add(layer: Added, x: Any) -> None:
    """Add a loss that is a sum over rows, or the square of one."""
    total = 0.02 * ops.sum(ops.square(x))
    layer.add_loss(total if layer.kind == "sum" else ops.square(total))


class Mean(keras.regularizers.Regularizer):
    """Compares the mean of each unit with a target, as a sparse autoencoder does."""

    def __call__(self, x: Any) -> Any:
        return ops.sum(ops.square(ops.mean(x, axis=0) - 0.2))


class Halves(keras.regularizers.Regularizer):
    """Is a sum over rows, as Keras's own are."""

    def __call__(self, x: Any) -> Any:
        return 0.5 * ops.sum(ops.abs(x))


def positions() -> keras.Model:
    i = layers.Input((7,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(Positions()(layers.Embedding(12, 4)(i)))
    return compiled(keras.Model(i, layers.Dense(1)(x)), "mse", keras.optimizers.Adam(0.01))


def table() -> keras.Model:
    return with_layer(Table(), keras.optimizers.Adam(0.01))


def with_layer(layer: Any, optimizer: Any = None) -> keras.Model:
    i = layers.Input((6,))
    return compiled(keras.Model(i, layers.Dense(1)(layer(i))), "mse", optimizer)


def added_sum() -> keras.Model:
    return with_layer(Added("sum"))


def added_square() -> keras.Model:
    return with_layer(Added("square"))


def regularized_by_mean() -> keras.Model:
    return with_layer(layers.Dense(4, activity_regularizer=Mean()))


def regularized_by_sum() -> keras.Model:
    return with_layer(layers.Dense(4, activity_regularizer=Halves()))


@pytest.mark.parametrize("loop", ["fit", pytest.param("custom", marks=pytest.mark.slow)])
def test_rows_that_all_replicas_look_up_are_merged(tmp_path: Path, loop: str) -> None:
    if loop == "fit":
        compare(tmp_path, f"{HERE}:table", loop=loop)
    else:
        compare(tmp_path, f"{HERE}:positions", data="tests.corpus.models:tokens_sum", loop=loop)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_added_losses_are_found(tmp_path: Path, loop: str) -> None:
    compare(tmp_path, f"{HERE}:added_sum", loop=loop)
    with pytest.raises(ConfigError, match=r"the layer 'added[_0-9]*' adds a loss .* neither a mean nor a sum"):
        train(tmp_path / "square", TWO, f"{HERE}:added_square", loop=loop)


@pytest.mark.parametrize("loop", ["fit", pytest.param("custom", marks=pytest.mark.slow)])
def test_activity_regularizers_are_tried(tmp_path: Path, loop: str) -> None:
    train(tmp_path / "one", ONE, f"{HERE}:regularized_by_mean", loop=loop)
    with pytest.raises(ConfigError, match=r"the layer 'dense[_0-9]*' adds a loss .*activity_regularizer"):
        train(tmp_path / "mean", TWO, f"{HERE}:regularized_by_mean", loop=loop)


@pytest.mark.slow
def test_activity_regularizers_that_are_sums_are_exact(tmp_path: Path) -> None:
    compare(tmp_path, f"{HERE}:regularized_by_sum", loop="fit")
