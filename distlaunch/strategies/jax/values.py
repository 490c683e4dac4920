"""Values of a model's variables on a JAX mesh: on the devices for a step, and as host arrays for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.jax.feed import place
from distlaunch.strategies.mesh.functional_step import TrainState
from distlaunch.strategies.mesh.layout import Axes, slot_layout
from distlaunch.strategies.mesh.parts import Block, StoredVariable
from distlaunch.strategies.mesh.state import snapshot_variables, variable_placement
from distlaunch.strategies.variables import state_variables


class Values:
    """Values of a model's variables, which the constructor puts on the mesh.

    Args:
        layouts: axes of the weights that are split, by path.
        peers: the processes whose devices form the mesh.

    Attributes:
        groups: the four groups of a step's variables: trainable, non-trainable, optimizer, metrics.
        shardings: shardings of the values of each group.
    """

    def __init__(self, model: keras.Model, mesh: Mesh, layouts: Mapping[str, Axes], peers: Peers) -> None:
        self._model, self._mesh, self._peers = model, mesh, peers
        self._layouts = dict(layouts)
        self._whole = NamedSharding(mesh, PartitionSpec())
        optimizer = getattr(model, "optimizer", None)
        self.groups = (
            list(model.trainable_variables),
            list(model.non_trainable_variables),
            list(optimizer.variables) if optimizer is not None else [],
            list(model.metrics_variables),
        )
        trainable, others, slots, metrics = self.groups
        weights = model.weights
        slot_shardings = [self._sharding(slot_layout(slot, weights, layouts)) for slot in slots]
        self.shardings: Any = (
            self._weight_shardings(trainable),
            self._weight_shardings(others),
            slot_shardings,
            [self._whole for _ in metrics],
        )
        self._sharding_of = {
            id(variable): sharding
            for group, shardings in zip(self.groups, self.shardings, strict=True)
            for variable, sharding in zip(group, shardings, strict=True)
        }
        self._gather = jax.jit(lambda value: value, out_shardings=self._whole)
        self.assign(self.read())

    def kernel_layouts(self) -> dict[tuple[int, ...], list[Axes]]:
        """Return the axes of the trainable weights that are split, by shape."""
        found: dict[tuple[int, ...], list[Axes]] = {}
        for variable in self.groups[0]:
            axes = self._layouts.get(variable.path, ())
            ways = found.setdefault(tuple(variable.shape), [])
            if any(axes) and axes not in ways:
                ways.append(axes)
        return found

    def _weight_shardings(self, variables: list[Any]) -> list[NamedSharding]:
        return [self._sharding(self._layouts.get(variable.path, ())) for variable in variables]

    def _sharding(self, axes: Axes) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*axes)) if axes else self._whole

    def read(self) -> TrainState:
        """Return the values of all variables on the mesh; a value that a callback has assigned is put there first."""
        read = [
            [place(variable.value, sharding) for variable, sharding in zip(group, shardings, strict=True)]
            for group, shardings in zip(self.groups, self.shardings, strict=True)
        ]
        return read[0], read[1], read[2], read[3]

    def assign(self, state: TrainState) -> None:
        for group, values in zip(self.groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    def put(self, variable: Any, value: np.ndarray) -> None:
        """Assign a value; only the blocks for this process's devices are read from it."""
        sharding = self._sharding_of.get(id(variable))
        same_type = value.dtype.name == variable.dtype
        variable.assign(place(value, sharding) if sharding is not None and same_type else value)

    def copy(self, variable: Any) -> np.ndarray:
        """Return a copy of the whole value; if several processes hold parts of it, every process must call this."""
        value: Any = variable.value
        if self._peers.number > 1 and not value.is_fully_replicated and not value.is_fully_addressable:
            value = self._gather(value)
        return _copy_to_host(value)

    def local_copy(self, variable: Any) -> np.ndarray | None:
        """Return a copy of the whole value, or None if other processes hold parts of it."""
        value: Any = variable.value
        if not value.is_fully_replicated and not value.is_fully_addressable:
            return None
        return _copy_to_host(value)

    def stored(self) -> dict[str, StoredVariable]:
        """Return each variable of a snapshot with the block that each device holds."""
        self.assign(self.read())
        return {name: self._stored(variable.value) for name, variable in snapshot_variables(self._model).items()}

    def _stored(self, value: Any) -> StoredVariable:
        shape = tuple(value.shape)

        def block_of(index: Any) -> Block:
            return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))

        def value_of(block: Block) -> np.ndarray:
            return _copy_to_host(
                next(shard.data for shard in value.addressable_shards if block_of(shard.index) == block)
            )

        if getattr(value.sharding, "mesh", None) == self._mesh:
            indices = value.sharding.devices_indices_map(shape)
            devices = [(device.process_index, block_of(index)) for device, index in indices.items()]
        else:  # a variable that steps do not use, of which each process has a whole copy
            devices = [(rank, tuple((0, size) for size in shape)) for rank in range(self._peers.number)]
        return StoredVariable(shape, value.dtype.itemsize, devices, value_of)

    def placement(self) -> list[dict[str, Any]]:
        """See `Program.placement`."""
        return [self._describe_placement(name, variable) for name, variable in state_variables(self._model).items()]

    def _describe_placement(self, name: str, variable: Any) -> dict[str, Any]:
        value: Any = variable.value
        shape = [int(size) for size in value.shape]
        spec = getattr(value.sharding, "spec", ())
        axes = [*spec, *[None] * (len(shape) - len(spec))]
        order = {device: index for index, device in enumerate(self._mesh.devices.flat)}
        devices = [
            (order[device], [list(part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)])
            for device, index in value.sharding.devices_indices_map(value.shape).items()
        ]
        return variable_placement(name, shape, value.dtype, axes, devices)


def _copy_to_host(value: jax.Array) -> np.ndarray:
    array = np.asarray(value)
    # only an array of a value on the CPU can share memory with JAX
    shared = not array.flags.owndata and all(device.platform == "cpu" for device in value.devices())
    return array.copy() if shared else array
