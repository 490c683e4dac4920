"""Puts batches on a DTensor mesh; each process reads the rows that its devices need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source
from distlaunch.data.rows import rows_of_process
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.dtensor.arrays import Mesh, gather, layout_of, parts_of_process, place_rows
from distlaunch.strategies.mesh.layout import Axes, dividing_axes, map_batch
from distlaunch.strategies.mesh.row_counts import RowCounts


class Feed:
    """Puts the batches of sources on the mesh.

    Args:
        axes: mesh axis of each dimension of the inputs; the first splits the examples.
        peers: the processes whose devices form the mesh.

    Attributes:
        rows: number of examples in all global batches so far.
    """

    def __init__(self, mesh: Mesh, axes: Axes, peers: Peers) -> None:
        self._mesh, self.axes, self._peers = mesh, axes, peers
        self._sizes = {axis: mesh.dim_size(axis) for axis in mesh.dim_names}
        self.rows = 0

    def batches(self, source: Source) -> Iterator[Batch | None]:
        """Yield each batch; None at the end of a pass of unknown length."""
        axis = self.axes[0] if self.axes else None
        first, number = parts_of_process(self._mesh, axis)
        parts = 1 if axis is None else self._sizes[axis]
        for batch, start, total in rows_of_process(source, first=first, number=number, of=parts):
            if source.is_process_local:
                counts = RowCounts.gather(self._peers, int(total), number)
                self.rows += counts.total
                yield counts.place(batch, self._pack, gather, tf.constant) if counts.total else None
                continue
            self.rows += int(total)
            yield self._pack(batch, int(start), int(total)) if total > 0 else None

    def _pack(self, batch: Batch, start: int, total: int) -> Batch:
        """Return a batch on the mesh, given the rows that this process's devices need."""

        def pack(leaf: Any, axes: Axes) -> Any:
            if not isinstance(leaf, tf.Tensor):
                message = f"a batch has {type(leaf).__name__}, which dtensor cannot split; make it dense"
                raise ConfigError(Problem(("data",), message))
            shape = [total, *leaf.shape.as_list()[1:]]
            chosen = dividing_axes(shape, axes, self._sizes)
            return place_rows(leaf, start, shape, layout_of(self._mesh, tuple(chosen)))

        return map_batch(pack, batch, self.axes)
