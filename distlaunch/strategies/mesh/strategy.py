"""Base class of mesh strategies, which chooses the layouts of a model's variables and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.strategies.base import CPU_DEVICES
from distlaunch.config.strategies.mesh import MeshSection
from distlaunch.data.batches import Share
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.mesh.layout import Mesh, choose_layouts, notes_of_processes, whole_batch_notes
from distlaunch.strategies.mesh.parts import MeshParts
from distlaunch.strategies.protocol import Parts, Program, Steps, Strategy


class MeshStrategy(Strategy):
    """Base of both mesh strategies.

    Args:
        mesh: the framework's own object for the mesh of devices.
        sizes: sizes of the mesh's axes.
        peers: the processes whose devices form the mesh.

    Attributes:
        program_class: class of the program, which takes the steps, the mesh, the layouts of split weights by path, the
            mesh axis of each dimension of the inputs, and the peers.
        whole_layers: types of layers that `layout: auto` does not split.
    """

    program_class: Callable[..., Any]
    whole_layers: tuple[type, ...] = ()

    def __init__(self, section: MeshSection, mesh: Any, sizes: Mesh, peers: Peers) -> None:
        self._section, self.mesh, self._sizes, self._peers = section, mesh, sizes, peers
        self.num_replicas = sizes.get(section.batch_axis or "", 1)
        self._notes: list[str] = []
        self._parts: MeshParts | None = None
        """Set with the program, if the mesh covers several processes."""

    def program(self, steps: Steps) -> Program:
        """Return the program, with layouts for the model's weights.

        Raises:
            ConfigError: a rule or a layout in the model's code matches no weight, or does not fit one that it matches.
        """
        layouts, notes = choose_layouts(self._section.layout, steps.model, self._sizes, self.whole_layers)
        axis, inputs = self._section.batch_axis, self._section.input_layout
        apart = notes_of_processes(layouts, lambda name: self._parts_here(name)[1] == self._sizes[name])
        self._notes = [*notes, *apart, *whole_batch_notes(axis, self._sizes)]
        input_axes = (axis,) if inputs is None else tuple(inputs)
        program = self.program_class(steps, self.mesh, layouts, input_axes, self._peers)
        self._parts = MeshParts(self._peers, program) if self._peers.number > 1 else None
        return program

    def share(self) -> Share:
        axis, number = self._section.batch_axis, self._peers.number
        if number == 1:
            return Share()
        first, here = self._parts_here(axis)
        if axis is None or here * number != self.num_replicas:
            message = f"the mesh does not give each process its own part of the batch (batch axis: {axis or 'none'})"
            why = f"so several of the {number} processes need the same rows, and all must read the same data"
            hint = "use `data.sharding: rows` without `data.streams`, or a mesh whose first axis splits the batch"
            raise ConfigError(Problem(("strategy", "mesh"), f"{message}, {why}; {hint}"))
        return Share(first // here, number)

    def _parts_here(self, axis: str | None) -> tuple[int, int]:
        """Return the index of the first part along an axis that this process's devices hold, and how many they hold."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        return self._notes

    def parts(self) -> Parts | None:
        return self._parts


def mesh_sizes(section: MeshSection, num_processes: int, num_gpus: int) -> tuple[dict[str, int], int]:
    """Return the sizes of the mesh's axes, and their product, for the same number of devices in each process.

    Args:
        num_gpus: number of GPUs of all processes; 0 to use as many virtual CPU devices as needed. If there are too few
            GPUs, the product is larger than their number, or 0.
    """
    product, wanted = section.product, section.product
    if -1 in section.mesh.values():
        step = math.lcm(product, num_processes)
        wanted = num_gpus // step * step if num_gpus else product * CPU_DEVICES
    return {axis: wanted // product if size == -1 else size for axis, size in section.mesh.items()}, wanted
