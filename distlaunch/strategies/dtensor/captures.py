"""Functions that run on a mesh, with the tensors that the model holds outside its variables."""

# pyright: reportFunctionMemberAccess=false, reportAttributeAccessIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch
from distlaunch.strategies.dtensor.arrays import place

_RESOURCES = (tf.resource, tf.variant)


class MeshFunction:
    """A function of a batch, traced for each shape of it.

    DTensor takes constants that the function uses only if they are tiny, and nothing from the host otherwise: layers
    that keep a table as a tensor, statistics given to `Normalization`, weights of a loss. They are copied to the mesh.
    """

    def __init__(self, function: Callable[[Batch], Any], mesh: dtensor.Mesh) -> None:
        self._call = tf.function(function, autograph=False, reduce_retracing=False)
        self._mesh = mesh
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, batch: Batch) -> Any:
        key = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tf.nest.flatten(batch))
        if key not in self._seen:
            # the call below finds this very function
            concrete = self._call.get_concrete_function(batch)
            concrete.set_external_captures([self._on_mesh(tensor) for tensor in concrete.captured_inputs])
            self._seen.add(key)
        return self._call(batch)

    def _on_mesh(self, tensor: tf.Tensor) -> tf.Tensor:
        if dtensor.is_dtensor(tensor):
            return tensor
        if tensor.dtype in _RESOURCES:
            message = "DTensor cannot use what the model keeps on the host: a tf.Variable of its own, or a lookup table"
            hint = "make it a weight of a layer, look up in `data.preprocessing`, or use kind: mirrored"
            raise ConfigError(Problem(("strategy", "kind"), f"{message}; {hint}"))
        return place(tensor, dtensor.Layout.replicated(self._mesh, rank=tensor.shape.rank))
