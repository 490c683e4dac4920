"""The value of a Keras variable that lies on a DTensor mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from distlaunch.base.errors import UsageError
from distlaunch.strategies.dtensor.arrays import joined, layout_of, place
from distlaunch.strategies.mesh.layout import Axes
from distlaunch.strategies.stand_in import StandIn


class MeshVariable(StandIn):
    """The value of a Keras variable that lies on a mesh.

    Where a tensor is wanted, it is the whole of it on the host; in a traced function the variable on the mesh, which a
    gradient tape watches.
    """

    def __init__(self, value: np.ndarray, mesh: dtensor.Mesh, axes: Axes) -> None:
        self.axes = (*axes, *[None] * (value.ndim - len(axes)))
        self.layout = layout_of(mesh, self.axes)
        self.on_mesh = dtensor.DVariable(place(value, self.layout))

    @property
    def dtype(self) -> tf.DType:
        return self.on_mesh.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.on_mesh.shape

    def assign(self, value: Any) -> None:
        self.on_mesh.assign(place(np.asarray(value), self.layout))

    @property
    def handle(self) -> Any:
        """By this a gradient tape knows the variable."""
        return self.on_mesh.handle

    def as_tensor(self) -> tf.Tensor:
        return self.on_mesh.read_value() if tf.inside_function() else tf.constant(self.numpy())

    def numpy(self) -> np.ndarray:
        """The whole value, put together from what this process holds.

        Raises:
            UsageError: other processes hold parts of it.
        """
        whole = joined(dtensor.unpack(self.on_mesh.read_value()), [int(n or 0) for n in self.shape], self.layout)
        if whole is None:
            message = "a variable is read whole in one process, but others hold parts of it"
            raise UsageError(f"{message}; let the mesh's first axes, which go over the processes, not split variables")
        return whole

    def gathered(self) -> np.ndarray:
        """The whole value; every process must call it."""
        whole = dtensor.Layout.replicated(self.layout.mesh, rank=len(self.axes))
        return dtensor.unpack(dtensor.relayout(self.on_mesh.read_value(), whole))[0].numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)
