"""Lets optimizers keep the norms of the gradients that they were last given, or take them dense."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# (what pyright infers of Keras's operations is often wrong)
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from distlaunch.patches.keras_overrides import between
from distlaunch.patches.keras_private import optimized
from distlaunch.strategies.variables import host_value, optimizers_of


class _WithNorms:
    """Between an optimizer and its class. Replica strategies call this with gradients summed over replicas."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        self._distlaunch_sparse_given |= any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        if self._distlaunch_dense:
            grads = _dense(grads)
        # it may be an iterator, and is gone through twice
        trainable_variables = trainable_variables and list(trainable_variables)
        self._distlaunch_norms.assign(_norms(self, grads, trainable_variables or optimized(self)))
        return super().apply(grads, trainable_variables)  # pyright: ignore[reportAttributeAccessIssue]

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """A LossScaleOptimizer's does not go through its `apply`."""
        trainable, slots = super().stateless_apply(optimizer_variables, grads, trainable_variables)  # pyright: ignore[reportAttributeAccessIssue]
        at = next(index for index, variable in enumerate(self.variables) if variable is self._distlaunch_norms)
        norms = _norms(self, grads, optimized(self))
        return trainable, [norms if index == at else value for index, value in enumerate(slots)]


def _dense(grads: list[Any]) -> list[Any]:
    return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def _norms(optimizer: Any, grads: Any, variables: Any) -> Any:
    """One for each variable of the optimizer; zero for those that have no gradient."""
    found = {id(variable): gradient for variable, gradient in zip(variables, _dense(list(grads)), strict=True)}
    gradients = [found.get(id(variable)) for variable in optimized(optimizer)]
    squares = [
        ops.zeros((), "float32") if gradient is None else ops.sum(ops.square(ops.cast(gradient, "float32")))
        for gradient in gradients
    ]
    return ops.sqrt(ops.stack(squares)) if squares else ops.zeros((0,), "float32")


def watch_gradients(model: keras.Model) -> None:
    """Adds a variable for the norms to each optimizer; to be called under the strategy's scope, before its program."""
    for optimizer in optimizers_of(model):
        shape = (len(optimized(optimizer)),)
        # gradients are summed already, so all replicas hold the same
        norms = optimizer.add_variable(shape, dtype="float32", aggregation="only_first_replica", name="gradient_norms")
        optimizer._distlaunch_norms = norms
        optimizer._distlaunch_dense = optimizer._distlaunch_sparse_given = False
        between(optimizer, _WithNorms)


def given_sparse(model: keras.Model) -> bool:
    """Whether a step that was traced had gradients of rows only, as those of embeddings are."""
    return any(optimizer._distlaunch_sparse_given for optimizer in optimizers_of(model))


@contextlib.contextmanager
def dense_gradients(model: keras.Model) -> Iterator[None]:
    """Steps that are traced within it have all gradients dense, as they are on a mesh."""
    for optimizer in optimizers_of(model):
        optimizer._distlaunch_dense = True
    try:
        yield
    finally:
        for optimizer in optimizers_of(model):
            optimizer._distlaunch_dense = False


def gradient_norms(model: keras.Model) -> list[float]:
    """The norm of each optimizer's last gradients."""
    return [float(np.linalg.norm(norms)) for norms in map(_known, optimizers_of(model))]


def norms_by_variable(model: keras.Model) -> dict[str, float]:
    """The norm of the last gradient of each variable, by its path."""
    return {
        variable.path: float(norm)
        for optimizer in optimizers_of(model)
        for variable, norm in zip(optimized(optimizer), _known(optimizer), strict=True)
    }


def _known(optimizer: Any) -> np.ndarray:
    return np.asarray(host_value(optimizer._distlaunch_norms), np.float64)
