"""Base class of mesh strategies, which chooses the layouts of a model's variables and inputs."""

from __future__ import annotations

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.strategies.mesh import MeshSection
from distlaunch.data.batches import Share
from distlaunch.strategies.mesh.layout import Axes, Mesh, choose_layouts, notes_of_processes, whole_batch_notes
from distlaunch.strategies.mesh.parts import MeshParts
from distlaunch.strategies.protocol import Parts, Strategy


class MeshStrategy(Strategy):
    """Base of both mesh strategies. A subclass sets `num_replicas`, the size of the axis that splits examples.

    Args:
        whole: types of layers that `layout: auto` does not split.
    """

    def __init__(self, config: MeshSection, whole: tuple[type, ...] = ()) -> None:
        self._config, self._whole = config, whole
        self._notes: list[str] = []
        self._parts: MeshParts | None = None
        """Set with the program, if the mesh covers several processes."""

    def lay_out(self, model: keras.Model, sizes: Mesh) -> tuple[dict[str, Axes], Axes]:
        """Return the layouts of split weights, by path, and the mesh axis of each dimension of the inputs.

        Args:
            sizes: sizes of the mesh's axes.

        Raises:
            ConfigError: a rule matches no weight, or does not fit a weight that it matches.
        """
        layouts, notes = choose_layouts(self._config.layout, model, sizes, self._whole)
        axis = self._config.batch_axis
        apart = notes_of_processes(layouts, lambda name: self._parts_here(name)[1] == sizes[name])
        self._notes = [*notes, *apart, *whole_batch_notes(axis, sizes)]
        inputs = self._config.input_layout
        return layouts, (axis,) if inputs is None else tuple(inputs)

    def share(self) -> Share:
        axis, number = self._config.batch_axis, self._peers.number
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
