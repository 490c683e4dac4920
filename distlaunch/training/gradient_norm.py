"""Lets optimizers keep the norm of the gradients that they were last given, or take them dense."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# (what pyright infers of Keras's operations is often wrong)
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from distlaunch.strategies.variables import host_value, optimizers_of


class _WithNorm:
    """Between an optimizer and its class. Replica strategies call this with gradients summed over replicas."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        self._distlaunch_sparse_given |= any(isinstance(gradient, tf.IndexedSlices) for gradient in grads)
        if self._distlaunch_dense:
            grads = _dense(grads)
        self._distlaunch_norm.assign(_norm(grads))
        return super().apply(grads, trainable_variables)  # pyright: ignore[reportAttributeAccessIssue]

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """A LossScaleOptimizer's does not go through its `apply`."""
        trainable, slots = super().stateless_apply(optimizer_variables, grads, trainable_variables)  # pyright: ignore[reportAttributeAccessIssue]
        norm = next(index for index, variable in enumerate(self.variables) if variable is self._distlaunch_norm)
        return trainable, [_norm(grads) if index == norm else value for index, value in enumerate(slots)]


def _dense(grads: list[Any]) -> list[Any]:
    return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]


def _norm(grads: list[Any]) -> Any:
    present = [gradient for gradient in _dense(grads) if gradient is not None]
    squares = [ops.sum(ops.square(ops.cast(gradient, "float32"))) for gradient in present]
    return ops.sqrt(sum(squares, start=ops.zeros((), "float32")))


def watch_gradients(model: keras.Model) -> None:
    """Adds a variable for the norm to each optimizer; to be called under the strategy's scope, before its program."""
    for optimizer in optimizers_of(model):
        cls: Any = type(optimizer)
        norm = optimizer.add_variable((), dtype="float32", aggregation="only_first_replica", name="gradient_norm")
        optimizer._distlaunch_norm = norm
        optimizer._distlaunch_dense = optimizer._distlaunch_sparse_given = False
        optimizer.__class__ = type(cls.__name__, (_WithNorm, cls), {})


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
    return [float(host_value(optimizer._distlaunch_norm)) for optimizer in optimizers_of(model)]
