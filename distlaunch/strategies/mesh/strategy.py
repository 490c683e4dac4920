"""What the strategies of meshes have in common: where variables and inputs of a model lie, and what to say of it."""

from __future__ import annotations

from collections.abc import Callable

import keras

from distlaunch.config.strategies.mesh import Mesh as MeshConfig
from distlaunch.strategies.coordination import AmongPeers
from distlaunch.strategies.mesh.layout import Axes, Mesh, chosen_layouts, notes_of_processes, whole_batch_notes
from distlaunch.strategies.mesh.parts import MeshParts
from distlaunch.strategies.protocol import Parts


class MeshStrategy(AmongPeers):
    """Base of both.

    Args:
        whole: kinds of layers that `layout: auto` leaves whole.
    """

    def __init__(self, config: MeshConfig, whole: tuple[type, ...] = ()) -> None:
        self._config, self._whole = config, whole
        self._notes: list[str] = []
        self._parts: MeshParts | None = None
        """Set with the program, if several processes have the mesh."""

    def lay_out(self, model: keras.Model, sizes: Mesh, num_here: Callable[[str], int]) -> tuple[dict[str, Axes], Axes]:
        """Layouts of the weights that are split, by path, and the mesh axis of each dimension of the inputs.

        Args:
            sizes: of the mesh's axes.
            num_here: along how many places of an axis this process has devices.

        Raises:
            ConfigError: a rule matches no weight, or one that it does not fit.
        """
        layouts, notes = chosen_layouts(self._config.layout, model, sizes, self._whole)
        axis = self._config.batch_axis
        apart = notes_of_processes(layouts, lambda name: num_here(name) == sizes[name])
        self._notes = [*notes, *apart, *whole_batch_notes(axis, sizes)]
        inputs = self._config.input_layout
        return layouts, (axis,) if inputs is None else tuple(inputs)

    def notes(self) -> list[str]:
        return self._notes

    def parts(self) -> Parts | None:
        return self._parts
