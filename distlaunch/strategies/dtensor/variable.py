"""The value of a Keras variable that lies on a DTensor mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from distlaunch.base.errors import UsageError
from distlaunch.strategies.dtensor.arrays import gathered, joined, layout_of, parts_of, place
from distlaunch.strategies.mesh.layout import Axes
from distlaunch.strategies.mesh.parts import Block, StoredVariable
from distlaunch.strategies.mesh.state import placed
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
        if tf.inside_function():
            self.on_mesh.assign(value)
            return
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
        whole = self.whole()
        if whole is None:
            message = "a variable is read whole in one process, but others hold parts of it"
            raise UsageError(f"{message}; let the mesh's first axes, which go over the processes, not split variables")
        return whole

    def whole(self) -> np.ndarray | None:
        """The same; None if other processes hold parts of it."""
        return joined(dtensor.unpack(self.on_mesh.read_value()), self._sizes(), self.layout)

    def gathered(self) -> np.ndarray:
        """The whole value; every process must call it."""
        return gathered(self.on_mesh.read_value())

    def stored(self) -> StoredVariable:
        """What each device holds of it."""
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
        """As the event VariablesPlaced has it."""
        devices = [(device, [list(bounds) for bounds in block]) for device, block in enumerate(self._blocks())]
        return placed(name, self._sizes(), np.dtype(self.dtype.as_numpy_dtype), self.axes, devices)

    def _blocks(self) -> list[Block]:
        """Of each device of the mesh."""
        parts = parts_of(self._sizes(), self.layout)
        return [tuple((one.start, one.stop) for one in part) for part in parts]

    def _sizes(self) -> tuple[int, ...]:
        return tuple(int(n or 0) for n in self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)
