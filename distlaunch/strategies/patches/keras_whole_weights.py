"""Makes Keras read, set and save the weights of split models as whole arrays.

`get_weights` and `set_weights`, which EarlyStopping uses, and `save_weights` and `save`, which ModelCheckpoint uses,
then work as for a model that is not split.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from distlaunch.patches.keras_private import layers_of, other_list, trainable_list
from distlaunch.patches.symbols import Patch, Symbol
from distlaunch.strategies.parameter_server.partition import join_shards, whole_path
from distlaunch.strategies.variables import host_value, optimizers_of

PATCH = Patch(
    symbols=(
        Symbol("keras.Layer.get_weights", "(self)"),
        Symbol("keras.Layer.set_weights", "(self, weights)"),
        Symbol("keras.Layer.save_own_variables", "(self, store)"),
        Symbol("keras.Layer.load_own_variables", "(self, store)"),
        Symbol("keras.Layer._check_load_own_variables", "(self, store)"),
        Symbol("keras.optimizers.Optimizer.save_own_variables", "(self, store)"),
        Symbol("keras.optimizers.Optimizer.load_own_variables", "(self, store)"),
    ),
    why="A layer whose variable is split over parameter servers lists the shards, and Keras would save those.",
    until="Keras supports split variables.",
)

_BY_POSITION = (keras.Layer.save_own_variables, keras.optimizers.Optimizer.save_own_variables)
"""Keras's methods that save a list of variables; other methods save attributes, which are whole variables already."""


def join_split_weights(model: keras.Model) -> None:
    """Replace the methods of layers and optimizers. Call this after `show_shards`."""
    PATCH.check()
    for layer in layers_of(model):
        if any(whole_path(variable) is not None for variable in layer.weights):
            _exchange_whole(layer)
            _save_whole(layer, lambda layer=layer: [*trainable_list(layer), *other_list(layer)])
    for optimizer in optimizers_of(model):
        _save_whole(optimizer, lambda optimizer=optimizer: optimizer.variables)


def _exchange_whole(layer: keras.Layer) -> None:
    def get_weights(self: Any) -> list[np.ndarray]:
        return [host_value(variable) for _, variable in join_shards(self.weights)]

    def set_weights(self: Any, weights: Sequence[Any]) -> None:
        variables = list(join_shards(self.weights))
        if len(variables) != len(weights):
            raise ValueError(f"set_weights: got {len(weights)} arrays for the {len(variables)} weights of {self.name}")
        for (path, variable), value in zip(variables, weights, strict=True):
            if tuple(variable.shape) != np.shape(value):
                raise ValueError(f"set_weights: {path} has shape {tuple(variable.shape)}; got {np.shape(value)}")
            variable.assign(value)

    layer.get_weights = types.MethodType(get_weights, layer)
    layer.set_weights = types.MethodType(set_weights, layer)


def _save_whole(owner: Any, own_variables: Callable[[], Sequence[Any]]) -> None:
    """Make Keras write and read the variables of a layer or an optimizer as whole arrays."""

    def save_own_variables(self: Any, store: Any) -> None:
        del self
        for index, (_, variable) in enumerate(join_shards(own_variables())):
            store[str(index)] = host_value(variable)

    def load_own_variables(self: Any, store: Any) -> None:
        # checked before the first assignment, so that no layer is loaded only in part
        check(self, store)
        for index, (_, variable) in enumerate(join_shards(own_variables())):
            variable.assign(store[str(index)])

    def check(self: Any, store: Any) -> None:
        if len(store.keys()) != (number := len(list(join_shards(own_variables())))):
            raise ValueError(f"got {len(store.keys())} values for the {number} variables of {self.name}")

    if isinstance(owner, keras.Layer):  # layers that save attributes call this check too
        owner._check_load_own_variables = types.MethodType(check, owner)
    # Embedding and some other layers have their own method, which saves attributes
    if type(owner).save_own_variables in _BY_POSITION:
        owner.save_own_variables = types.MethodType(save_own_variables, owner)
        owner.load_own_variables = types.MethodType(load_own_variables, owner)
