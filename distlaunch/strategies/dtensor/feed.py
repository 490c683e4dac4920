"""Puts batches on a DTensor mesh; each process reads the rows that its devices need."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source
from distlaunch.data.rows import rows_of_process
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.dtensor.arrays import Mesh, gather, layout_of, parts_of_process, place_rows
from distlaunch.strategies.mesh.layout import Axes, dividing_axes, map_batch
from distlaunch.strategies.mesh.row_counts import RowCounts

QUICK_S = 0.02
"""More batches than one are awaited only if the last one took no longer than these seconds."""
Shapes = tuple[tuple[tuple[int, ...], tf.DType], ...]
"""Shapes and types of the leaves of a batch."""


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


class BatchQueue:
    """Batches that are read before they are needed.

    Args:
        batches: yields each batch; None at the end of a pass of unknown length.
        may_differ: whether this process may read another number of batches ahead than others. Otherwise, the time that
            a batch takes does not count.
    """

    def __init__(self, batches: Iterator[Batch | None], *, may_differ: bool) -> None:
        self._batches, self._may_differ = batches, may_differ
        self._read: deque[Batch | None] = deque()
        self._failure: Exception | None = None

    def __len__(self) -> int:
        return len(self._read)

    def read(self, number: int) -> None:
        """Read until so many batches are here, while they come quickly; read one if there is none.

        A batch that cannot be read is an error only when it is taken, after the steps of the batches before it.
        """
        is_quick = True
        while len(self._read) < number and self._failure is None and (is_quick or not self._read):
            began = time.perf_counter()
            try:
                batch = next(self._batches)
            except Exception as error:
                self._failure = error
                return
            self._read.append(batch)
            if batch is None:
                return
            is_quick = not self._may_differ or time.perf_counter() - began <= QUICK_S

    def take(self, number: int, shapes: Shapes | None) -> Sequence[Batch] | None:
        """Return so many batches if all of them are here and have these shapes, or otherwise the next batch only.

        Returns:
            None at the end of a pass of unknown length.

        Raises:
            Exception: the next batch cannot be read.
        """
        self.read(1)
        if not self._read:
            assert self._failure is not None, "otherwise there is a batch, or an end"
            raise self._failure
        ahead = [self._read[index] for index in range(min(number, len(self._read)))]
        if len(ahead) < number or any(batch is None or shapes_of(batch) != shapes for batch in ahead):
            ahead = ahead[:1]
        for _ in ahead:
            self._read.popleft()
        return None if ahead[0] is None else ahead


def shapes_of(batch: Batch) -> Shapes:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tf.nest.flatten(batch))
