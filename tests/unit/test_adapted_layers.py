"""Layers that were adapted compute with the vocabulary or statistics of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from distlaunch.strategies.adapted_layers import adapted_values, changed_layers
from distlaunch.strategies.state import State, StateMismatchError
from distlaunch.strategies.variables import host_value, restore_variables, state_variables, untracked_state

pytestmark = pytest.mark.usefixtures("virtual_devices")
L = keras.layers
FIRST = ["red", "green", "blue", "red green"], np.array([[1.0], [2.0], [6.0], [7.0]], np.float32)
OTHER = ["black", "white", "grey", "black white"], np.array([[10.0], [30.0], [31.0], [90.0]], np.float32)
Data = tuple[list[str], np.ndarray]


def model(kind: str, data: Data) -> keras.Model:
    keras.utils.clear_session(free_memory=False)  # equal names of layers, as in the attempts of a run
    layer = LAYERS[kind]()
    layer.adapt(data[0] if kind in TEXT else data[1].astype(DTYPES.get(kind, "float32")))
    return keras.Sequential([keras.Input((1,), dtype=DTYPES.get(kind, "float32")), layer])


LAYERS: dict[str, Callable[[], Any]] = {
    "lookup": L.StringLookup,
    "one_hot": lambda: L.StringLookup(output_mode="one_hot"),
    "text": lambda: L.TextVectorization(output_mode="tf_idf", max_tokens=9, pad_to_max_tokens=True),
    "integers": lambda: L.IntegerLookup(output_mode="multi_hot"),
    "statistics": lambda: L.Normalization(dtype="float16"),
    "bins": lambda: L.Discretization(num_bins=3),
}
TEXT = ("lookup", "one_hot", "text")
DTYPES = {**dict.fromkeys(TEXT, "string"), "integers": "int64"}


def saved(model: keras.Model) -> State:
    return {**{name: host_value(one) for name, one in state_variables(model).items()}, **untracked_state(model)}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_use_what_the_checkpoint_was_trained_with(kind: str) -> None:
    first, other = model(kind, FIRST), model(kind, OTHER)
    x = tf.constant(FIRST[0])[:, None] if kind in TEXT else tf.constant(FIRST[1].astype(DTYPES.get(kind, "float32")))
    expected, before = np.asarray(first(x)), adapted_values(other)
    assert not np.array_equal(np.asarray(other(x)), expected)
    restore_variables(other, saved(first))
    np.testing.assert_array_equal(np.asarray(other(x)), expected)
    assert len(changed_layers(before, other)) == 1
    assert changed_layers(adapted_values(first), other) == []
    assert {name: value.tolist() for name, value in saved(other).items()} == {
        name: value.tolist() for name, value in saved(first).items()
    }


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    smaller = model("one_hot", (["a", "b"], FIRST[1]))
    with pytest.raises(StateMismatchError, match="'string_lookup' was saved with a vocabulary of 5 terms, but now "):
        restore_variables(smaller, saved(model("one_hot", FIRST)))


def test_statistics_given_in_code_win() -> None:
    """The user has changed them in the model's function."""
    made = [keras.Sequential([keras.Input((1,)), L.Normalization(mean=mean, variance=1.0)]) for mean in (1.0, 2.0)]
    restore_variables(made[1], saved(made[0]))
    assert float(made[1](np.ones((1, 1)))[0, 0]) == -1
