"""Puts batches on the devices of a JAX mesh.

The next batch is loaded while the devices compute. The time that steps wait for batches is measured.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source
from distlaunch.data.on_host import rows as on_host
from distlaunch.data.rows import rows_of_process
from distlaunch.data.structures import ArraySpec, map_structure
from distlaunch.patches.jax_partitioning import Kernels, Uncertain
from distlaunch.patches.tensorflow_late import is_a
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.mesh.layout import Axes, dividing_axes, map_batch
from distlaunch.strategies.mesh.row_counts import RowCounts
from distlaunch.strategies.step_times import MEASURE_EVERY, StepTimes

_NUM_MEASUREMENTS = 8  # number of measurements; their mean is used for the steps that are not measured


class Placement:
    """Places batches on a mesh: inputs are split by `axes`, and labels and weights by the first axis."""

    def __init__(self, mesh: Mesh, axes: Axes) -> None:
        self._mesh, self.axes = mesh, axes
        self._gather = jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, PartitionSpec()))
        axis = axes[0] if axes else None
        self._first, self.parts_here = parts_of_process(mesh, axis)
        self._parts = mesh.shape[axis] if axis is not None else 1
        self._applies_all = False

    @property
    def all_remedies(self) -> Uncertain:
        """A description in which XLA may compute every operation wrongly on this mesh, so that all are replaced."""
        return Uncertain(Kernels.ALL, True, self._mesh)

    def apply_all_remedies(self) -> None:
        """Apply all remedies to every subsequent batch."""
        self._applies_all = True

    def rows_of_process(self, source: Source) -> Iterable[Any]:
        """Return the part of each batch that this process reads; see `data.rows.rows_of_process`."""
        read = on_host.rows_of_process if source.on_host else rows_of_process
        return read(source, first=self._first, number=self.parts_here, of=self._parts)

    def put(self, batch: Batch, start: int, total: int) -> Batch:
        """Put host arrays on the devices, without splitting the rows if their number is not divisible.

        Args:
            start: index of the first row in the global batch.
            total: number of rows of the global batch.
        """

        def put_leaf(leaf: np.ndarray, axes: Axes) -> jax.Array:
            shape = (total, *leaf.shape[1:])
            return _from_parts(leaf, start, shape, self._sharding(shape, axes))

        return self._map(put_leaf, batch)

    def put_process_local(self, batch: Batch, counts: RowCounts) -> Batch:
        """Put process-local rows on the devices; see `put`."""
        return counts.place(batch, self.put, lambda leaf: np.asarray(self._gather(leaf)), lambda array: array)

    def remedies_for(self, batch: Batch) -> Uncertain:
        """Return which results XLA may compute wrongly on this mesh for a batch with this placement."""
        if self._applies_all:
            return self.all_remedies
        large = {axis for axis, size in self._mesh.shape.items() if size > 1}
        split: list[set[str]] = []

        def look(leaf: Any, axes: Axes) -> Any:
            chosen = dividing_axes(leaf.shape, axes, self._mesh.shape)
            if any(chosen[1:]):
                split.append({axis for axis in chosen if axis is not None})
            return leaf

        self._map(look, batch)
        several = len(large) > 1
        kernels = Kernels.GROUPED if several else Kernels.NONE
        if several and any(large - axes for axes in split):
            kernels = Kernels.ALL
        return Uncertain(kernels, bool(split), self._mesh if several else None)

    def _map(self, action: Any, batch: Batch) -> Batch:
        return map_batch(action, batch, self.axes)

    def _sharding(self, shape: tuple[int, ...], axes: Axes) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*dividing_axes(shape, axes, self._mesh.shape)))


def parts_of_process(mesh: Mesh, axis: str | None) -> tuple[int, int]:
    """Return the index of the first part along an axis that this process's devices hold, and how many they hold."""
    if axis is None:
        return 0, 1
    dimension, here = mesh.axis_names.index(axis), jax.process_index()
    places = [place[dimension] for place, device in np.ndenumerate(mesh.devices) if device.process_index == here]
    return min(places), max(places) - min(places) + 1


def place(value: Any, sharding: NamedSharding) -> jax.Array:
    """Put a value on the devices, unless it is there already; every process passes the whole value."""
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    whole = np.asarray(value)
    return _from_parts(whole, 0, whole.shape, sharding)


def _from_parts(rows: np.ndarray, start: int, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Return an array on the devices of all processes.

    Args:
        rows: all rows that the devices of this process need.
        start: index of the first of these rows in the array.
        shape: shape of the array.
    """

    def part(index: Any) -> np.ndarray:
        # a scalar has no dimensions to slice
        if not index:
            return rows
        first, stop, _ = index[0].indices(shape[0])
        return rows[(slice(first - start, stop - start), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, part)


class Feed:
    """Reads the batches of a source one after the other.

    Attributes:
        waited_s: total seconds of waiting for batches to be read.
        rows: number of examples in all global batches so far.
    """

    def __init__(self, source: Source, placement: Placement, peers: Peers) -> None:
        self._parts = iter(placement.rows_of_process(source))
        self._placement, self._peers, self._is_process_local = placement, peers, source.is_process_local
        self._loaded: list[tuple[Batch | None, int]] = []
        self.waited_s = 0.0
        self.rows = 0

    def take(self) -> Batch | None:
        """Return the next batch; None at the end of a pass of unknown length."""
        self.load_ahead()
        batch, rows = self._loaded.pop()
        self.rows += rows
        return batch

    def load_ahead(self) -> None:
        """Start to copy the next batch to the devices, unless it has been started already."""
        if not self._loaded:
            began = time.perf_counter()
            batch, start, total = next(self._parts)
            self.waited_s += time.perf_counter() - began
            if self._is_process_local:
                counts = RowCounts.gather(self._peers, int(total), self._placement.parts_here)
                put = self._placement.put_process_local(to_jax_arrays(batch), counts) if counts.total else None
                self._loaded.append((put, counts.total))
                return
            rows = int(total)
            self._loaded.append((self._placement.put(to_jax_arrays(batch), int(start), rows) if rows else None, rows))


def to_jax_arrays(batch: Batch) -> Batch:
    """Return the batch as arrays that JAX supports.

    Raises:
        ConfigError: the batch contains text, or rows of different lengths.
    """
    return map_structure(_to_jax_array, batch)


def _to_jax_array(leaf: Any) -> np.ndarray:
    """Return an array or a tensor as an array of a type that JAX uses by default, which has at most 32 bits."""
    if isinstance(leaf, np.ndarray):
        kind, is_supported = ArraySpec.of(leaf).dtype, True
    else:
        is_supported = is_a(leaf, "Tensor")
        kind = leaf.dtype.name if is_supported else type(leaf).__name__
    if not is_supported or kind in ("string", "variant"):
        message = (
            f"a batch has a component of type {kind}, which JAX does not support; "
            "convert it to a numeric array with the same shape for every example, in the data function"
        )
        raise ConfigError(Problem(("data",), message))
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


class StepClock:
    """Measures steps, and the time that the devices are idle because the next batch is not ready.

    JAX returns from a step before the devices have computed it, and the next batch is read meanwhile. So the time that
    Python waits for a batch does not show whether the devices wait. Therefore, in one of several steps, Python first
    waits until the devices have finished, and then measures the wait for the batch. In that step, copying the next
    batch does not overlap with computation, which is the cost of measuring.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._measured: deque[float] = deque(maxlen=_NUM_MEASUREMENTS)
        self._ends: list[float] = []
        self._rows = 0

    def begin(self, feed: Feed) -> None:
        """Start a call."""
        self._ends, self._rows = [time.perf_counter()], feed.rows

    def load_ahead(self, feed: Feed, probe: jax.Array) -> None:
        """Read the next batch; `probe` is ready when the devices have finished all steps so far."""
        # not in the first step, which compiles while two batches are read
        measures = self._steps % MEASURE_EVERY == MEASURE_EVERY // 2
        self._steps += 1
        if measures:
            probe.block_until_ready()
        before = feed.waited_s
        feed.load_ahead()
        if measures:
            self._measured.append(feed.waited_s - before)

    def step_ended(self) -> None:
        """Record the end of one more step of the call."""
        self._ends.append(time.perf_counter())

    def times(self, feed: Feed, num_processes: int) -> StepTimes:
        """Return the times of the call."""
        seconds = tuple(end - began for began, end in itertools.pairwise(self._ends))
        mean = sum(self._measured) / len(self._measured) if self._measured else 0.0
        # the mean comes from other steps, so it is limited to the duration of this call
        return StepTimes(seconds, min(mean * len(seconds), sum(seconds)), (feed.rows - self._rows) / num_processes)
