"""The value of a Keras variable on a DTensor mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from distlaunch.base.errors import UsageError
from distlaunch.strategies.dtensor.arrays import Mesh, gather, join_parts, layout_of, place, slices_by_device
from distlaunch.strategies.mesh.layout import Axes
from distlaunch.strategies.mesh.parts import Block, StoredVariable
from distlaunch.strategies.mesh.state import variable_placement
from distlaunch.strategies.stand_in import StandIn


class MeshVariable(StandIn):
    """Value of a Keras variable on a mesh.

    When used as a tensor, it is the whole value on the host, and in a traced function the value on the mesh.
    """

    def __init__(self, value: np.ndarray, mesh: Mesh, axes: Axes) -> None:
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
        if tf.inside_function():
            self.on_mesh.assign(value)
            return
        self.on_mesh.assign(place(np.asarray(value), self.layout))

    def assign_add(self, value: Any) -> None:
        # Keras's SwapEMAWeights adds to values, not to Keras variables
        self.assign(self + value)

    def as_tensor(self) -> tf.Tensor:
        return self.on_mesh.read_value() if tf.inside_function() else tf.constant(self.numpy())

    def numpy(self) -> np.ndarray:
        """Return the whole value, joined from the parts that this process holds.

        Raises:
            UsageError: other processes hold parts of it.
        """
        whole = self.whole()
        if whole is None:
            message = "one process reads a whole variable, but other processes hold parts of it"
            raise UsageError(f"{message}; do not split variables by the mesh's first axes, which span the processes")
        return whole

    def whole(self) -> np.ndarray | None:
        """Return the whole value, or None if other processes hold parts of it."""
        return join_parts(dtensor.unpack(self.on_mesh.read_value()), self._sizes(), self.layout)

    def gathered(self) -> np.ndarray:
        """Return the whole value; every process must call it."""
        return gather(self.on_mesh.read_value())

    def stored(self) -> StoredVariable:
        """Return the variable with the block that each device holds."""
        blocks = self._blocks()
        components: list[Any] = []

        def value_of(block: Block) -> np.ndarray:
            if not components:
                components.extend(dtensor.unpack(self.on_mesh.read_value()))
            here = [blocks[device] for device in local]
            return np.array(components[here.index(block)])

        local = self.layout.mesh.local_device_ids()
        devices = [(device // len(local), block) for device, block in enumerate(blocks)]
        return StoredVariable(self._sizes(), self.dtype.size, devices, value_of)

    def placed(self, name: str) -> dict[str, Any]:
        """Return the variable in the format of the event VariablesPlaced."""
        devices = [(device, [list(bounds) for bounds in block]) for device, block in enumerate(self._blocks())]
        return variable_placement(name, self._sizes(), np.dtype(self.dtype.as_numpy_dtype), self.axes, devices)

    def _blocks(self) -> list[Block]:
        """Return the block of each device of the mesh."""
        parts = slices_by_device(self._sizes(), self.layout)
        return [tuple((one.start, one.stop) for one in part) for part in parts]

    def _sizes(self) -> tuple[int, ...]:
        return tuple(int(n or 0) for n in self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)
