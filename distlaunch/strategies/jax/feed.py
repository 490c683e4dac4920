"""Batches on the devices of a JAX mesh, the next one loaded while the devices compute, and what steps wait for them."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source
from distlaunch.data.rows import own_rows
from distlaunch.patches.jax_partitioning import Kernels, Uncertain
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.mesh.layout import Axes, dividing_axes, map_batch
from distlaunch.strategies.mesh.own_rows import RowCounts
from distlaunch.strategies.step_times import StepTimes

_EVERY = 7  # steps, of which one is measured; odd, since two batches may come together, and every other step waits
_LATEST = 8  # measurements whose mean stands for the other steps


class Placement:
    """Where a batch lies: inputs are split by `axes`, labels and weights by the first of them."""

    def __init__(self, mesh: Mesh, axes: Axes) -> None:
        self._mesh, self.axes = mesh, axes
        self._gather = jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, PartitionSpec()))
        axis = axes[0] if axes else None
        self._first, self.parts_here = parts_of_process(mesh, axis)
        self._parts = mesh.shape[axis] if axis is not None else 1
        self._applies_all = False

    @property
    def all_remedies(self) -> Uncertain:
        """All that there are against what XLA gets wrong."""
        return Uncertain(Kernels.ALL, True, self._mesh)

    def apply_all_remedies(self) -> None:
        """From now on, whatever the batch."""
        self._applies_all = True

    def own_rows(self, source: Source) -> tf.data.Dataset:
        """What this process has to read of each batch; see there."""
        return own_rows(source, first=self._first, number=self.parts_here, of=self._parts)

    def put(self, batch: Batch, start: int, total: int) -> Batch:
        """Host arrays on the devices; a dimension of the batch that its axis does not divide stays whole.

        Args:
            start, total: which row of the global batch the first is, and how many that has.
        """

        def put_leaf(leaf: np.ndarray, axes: Axes) -> jax.Array:
            shape = (total, *leaf.shape[1:])
            return _from_parts(leaf, start, shape, self._sharding(shape, axes))

        return self._map(put_leaf, batch)

    def put_own(self, batch: Batch, counts: RowCounts) -> Batch:
        """As `put`, of the rows that each process has for itself."""
        return counts.place(batch, self.put, lambda leaf: np.asarray(self._gather(leaf)), lambda array: array)

    def uncertain(self, batch: Batch) -> Uncertain:
        """What XLA gets wrong on this mesh, with a batch that lies on it so."""
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
    """The first of the parts along an axis that devices of this process hold, and how many there are up to the last."""
    if axis is None:
        return 0, 1
    dimension, here = mesh.axis_names.index(axis), jax.process_index()
    places = [place[dimension] for place, device in np.ndenumerate(mesh.devices) if device.process_index == here]
    return min(places), max(places) - min(places) + 1


def place(value: Any, sharding: NamedSharding) -> jax.Array:
    """A value that every process has, on the devices of all; one that lies there already stays."""
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    whole = np.asarray(value)
    return _from_parts(whole, 0, whole.shape, sharding)


def _from_parts(rows: np.ndarray, start: int, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The array of this shape of which `rows`, from number `start` on, are all that the devices here need."""

    def part(index: Any) -> np.ndarray:
        # a scalar has no dimensions to cut
        if not index:
            return rows
        first, stop, _ = index[0].indices(shape[0])
        return rows[(slice(first - start, stop - start), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, part)


class Feed:
    """Takes a source's batches in turn.

    Attributes:
        waited_s: how long it has waited until batches were read.
        rows: examples of all global batches that were taken.
    """

    def __init__(self, source: Source, placement: Placement, peers: Peers) -> None:
        self._parts = iter(placement.own_rows(source))
        self._placement, self._peers, self._own = placement, peers, source.own
        self._ahead: list[tuple[Batch | None, int]] = []
        self.waited_s = 0.0
        self.rows = 0

    def take(self) -> Batch | None:
        """The next batch; None at the end of a pass whose length was not known."""
        self.load_ahead()
        batch, rows = self._ahead.pop()
        self.rows += rows
        return batch

    def load_ahead(self) -> None:
        """Starts to copy the next batch, if that is not done yet."""
        if not self._ahead:
            began = time.perf_counter()
            batch, start, total = next(self._parts)
            self.waited_s += time.perf_counter() - began
            if self._own:
                counts = RowCounts.agreed(self._peers, int(total), self._placement.parts_here)
                put = self._placement.put_own(on_host(batch), counts) if counts.total else None
                self._ahead.append((put, counts.total))
                return
            rows = int(total)
            self._ahead.append((self._placement.put(on_host(batch), int(start), rows) if rows else None, rows))


def on_host(batch: Batch) -> Batch:
    """The batch as arrays that JAX can hold.

    Raises:
        ConfigError: it holds text, or rows of different lengths.
    """
    return tf.nest.map_structure(_array, batch)


def _array(leaf: Any) -> np.ndarray:
    """As JAX holds it, without 64 bits."""
    if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.string, tf.variant):
        kind = leaf.dtype.name if isinstance(leaf, tf.Tensor) else type(leaf).__name__
        message = f"a batch holds {kind}, which JAX does not have; make it numbers of one shape in the data function"
        raise ConfigError(Problem(("data",), message))
    array = leaf.numpy()
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


class StepClock:
    """Measures steps, and how long the devices had nothing to do because the next batch was not there.

    JAX returns from a step before the devices have computed it, and the next batch is read meanwhile: what Python waits
    for a batch says nothing about the devices. So in one step of a few, Python first waits until the devices are done,
    and then for the batch: from there on they wait with it. In that step the copy of the next batch does not overlap
    with computing, which is what measuring costs.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._measured: deque[float] = deque(maxlen=_LATEST)
        self._ends: list[float] = []
        self._rows = 0

    def begin(self, feed: Feed) -> None:
        """A call begins."""
        self._ends, self._rows = [time.perf_counter()], feed.rows

    def load_ahead(self, feed: Feed, probe: jax.Array) -> None:
        """Reads the next batch; `probe` is there when the devices are done with all steps so far."""
        # the first step compiles, and the two batches that were read meanwhile are taken first
        measures = self._steps % _EVERY == _EVERY // 2
        self._steps += 1
        if measures:
            probe.block_until_ready()
        before = feed.waited_s
        feed.load_ahead()
        if measures:
            self._measured.append(feed.waited_s - before)

    def step_ended(self) -> None:
        """The devices are done with one more step of the call."""
        self._ends.append(time.perf_counter())

    def times(self, feed: Feed, num_processes: int) -> StepTimes:
        """Of the call."""
        seconds = tuple(end - began for began, end in itertools.pairwise(self._ends))
        mean = sum(self._measured) / len(self._measured) if self._measured else 0.0
        # a mean of other steps: never more than this call took
        return StepTimes(seconds, min(mean * len(seconds), sum(seconds)), (feed.rows - self._rows) / num_processes)
