"""Puts batches on the devices of a JAX mesh.

The next batch is loaded while the devices compute. The time that steps wait for batches is measured.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source
from distlaunch.data.on_host import rows as on_host
from distlaunch.data.rows import rows_of_process
from distlaunch.data.structures import ArraySpec, flatten, map_structure
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

    def put_stacked(self, batches: Sequence[Batch], slots: int, start: int, total: int) -> Batch:
        """Put batches of the same shapes on the devices, as arrays of shape [slots, rows, ...]; see `put`.

        If there are more slots than batches, the others hold any values.
        """

        def stack(*leaves: np.ndarray) -> np.ndarray:
            rows = np.empty((slots, *leaves[0].shape), leaves[0].dtype)
            np.stack(leaves, out=rows[: len(leaves)])
            return rows

        def put_leaf(rows: np.ndarray, axes: Axes) -> jax.Array:
            shape = (total, *rows.shape[2:])
            spec = PartitionSpec(None, *self._sharding(shape, axes).spec)
            return _from_parts(rows, start, (slots, *shape), NamedSharding(self._mesh, spec), dimension=1)

        return self._map(put_leaf, map_structure(stack, *batches))

    def constrained(self, batch: Batch) -> Batch:
        """Return a traced batch with the sharding that `put` gives it."""

        def constrain(leaf: Any, axes: Axes) -> Any:
            return jax.lax.with_sharding_constraint(leaf, self._sharding(leaf.shape, axes))

        return self._map(constrain, batch)

    def spec(self, batch: Batch, total: int) -> Batch:
        """Return the types and shardings of a batch after `put`."""

        def spec_of(leaf: np.ndarray, axes: Axes) -> jax.ShapeDtypeStruct:
            shape = (total, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self._sharding(shape, axes))

        return self._map(spec_of, batch)

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


def _from_parts(
    rows: np.ndarray, start: int, shape: tuple[int, ...], sharding: NamedSharding, dimension: int = 0
) -> jax.Array:
    """Return an array on the devices of all processes.

    Args:
        rows: all rows that the devices of this process need.
        start: index of the first of these rows in the array.
        shape: shape of the array.
        dimension: the dimension that counts the rows.
    """

    def part(index: Any) -> np.ndarray:
        # a scalar has no dimensions to slice
        if not index:
            return rows
        first, stop, _ = index[dimension].indices(shape[dimension])
        return rows[(*index[:dimension], slice(first - start, stop - start), *index[dimension + 1 :])]

    return jax.make_array_from_callback(shape, sharding, part)


class Group(NamedTuple):
    """Some of the batches that are stacked on the devices, or a single batch that is not stacked.

    Attributes:
        batches: arrays of shape [slots, rows, ...]; [rows, ...] if not stacked.
        first: index of the first batch in the stack.
        number: number of batches.
    """

    batches: Batch
    first: int
    number: int
    is_stacked: bool


class _Part(NamedTuple):
    """This process's rows of a batch on the host; `batch` is None at the end of a pass."""

    batch: Batch | None
    start: int
    total: int


@dataclass
class _Loaded:
    """Batches on the devices; `number` is 0 at the end of a pass."""

    batches: Batch
    number: int
    rows: int
    is_stacked: bool = False
    used: int = 0


class Feed:
    """Reads the batches of a source one after the other.

    Attributes:
        waited_s: total seconds of waiting for batches to be read.
        rows: number of examples in all global batches so far.
    """

    def __init__(self, source: Source, placement: Placement, peers: Peers) -> None:
        self._parts = iter(placement.rows_of_process(source))
        self._placement, self._peers, self._is_process_local = placement, peers, source.is_process_local
        self._ahead: deque[_Part] = deque()
        self._failure: Exception | None = None
        self._loaded: _Loaded | None = None
        self._slots, self._stacked_shapes = 1, None
        self.waited_s = 0.0
        self.rows = 0

    def next_spec(self) -> Batch | None:
        """Return the types of the next batch, and read it; None at the end of a pass, or if rows are process-local."""
        if self._is_process_local:
            return None
        if not self._ahead:
            self._ahead.append(self._read())
        part = self._ahead[0]
        return None if part.batch is None else self._placement.spec(part.batch, part.total)

    def stack(self, slots: int, spec: Batch) -> None:
        """Stack batches of these shapes from now on, in so many slots."""
        self._slots, self._stacked_shapes = slots, [leaf.shape for leaf in flatten(spec)]

    def take(self) -> Batch | None:
        """Return the next batch, of a feed that does not stack; None at the end of a pass of unknown length."""
        group = self.take_group(1)
        return None if group is None else group.batches

    def take_group(self, most: int) -> Group | None:
        """Return the next batches, at most so many; None at the end of a pass of unknown length.

        Raises:
            Exception: the next batch cannot be read.
        """
        self.load_ahead(most)
        loaded = self._loaded
        if loaded is None:
            assert self._failure is not None, "otherwise there is a batch, or an end"
            raise self._failure
        number = min(most, loaded.number - loaded.used)
        group = Group(loaded.batches, loaded.used, number, loaded.is_stacked)
        loaded.used += number
        self.rows += number * loaded.rows
        if loaded.used == loaded.number:
            self._loaded = None
        return group if number else None

    def load_ahead(self, most: int = 1) -> int:
        """Start to copy the next batches to the devices, unless some are left; return the number of new ones.

        Args:
            most: number of batches that are needed next; more are copied while they come at once and fit the stack.
        """
        if self._loaded is not None:
            return 0
        parts: list[_Part] = []
        is_stacked, wanted = False, 1
        while len(parts) < wanted:
            waited_s = self.waited_s
            try:
                part = self._read()
            except Exception as error:  # raised when the batch is taken, after the steps of the batches before it
                self._failure = error
                break
            if parts and not self._fits(part):
                self._ahead.append(part)
                break
            if not parts and (is_stacked := self._slots > 1 and self._fits(part)):
                wanted = min(most, self._slots)
            parts.append(part)
            if is_stacked and len(parts) == wanted < self._slots and self.waited_s - waited_s <= on_host.QUICK_S:
                wanted += 1
        if not parts:
            return 0
        self._loaded = self._put_stacked(parts) if is_stacked else self._put(parts[0])
        return self._loaded.number

    def _read(self) -> _Part:
        if self._ahead:
            return self._ahead.popleft()
        if self._failure is not None:
            raise self._failure
        began = time.perf_counter()
        batch, start, total = next(self._parts)
        self.waited_s += time.perf_counter() - began
        # an end may have text, which cannot be converted
        is_end = batch is None or not (self._is_process_local or total)
        return _Part(None if is_end else to_jax_arrays(batch), int(start), int(total))

    def _fits(self, part: _Part) -> bool:
        if part.batch is None:
            return False
        return [(part.total, *leaf.shape[1:]) for leaf in flatten(part.batch)] == self._stacked_shapes

    def _put(self, part: _Part) -> _Loaded:
        if self._is_process_local:
            counts = RowCounts.gather(self._peers, part.total, self._placement.parts_here)
            put = self._placement.put_process_local(part.batch, counts) if counts.total else None
            return _Loaded(put, 1 if counts.total else 0, counts.total)
        if part.batch is None:
            return _Loaded(None, 0, 0)
        return _Loaded(self._placement.put(part.batch, part.start, part.total), 1, part.total)

    def _put_stacked(self, parts: Sequence[_Part]) -> _Loaded:
        _, start, total = parts[0]
        batches = self._placement.put_stacked([part.batch for part in parts], self._slots, start, total)
        return _Loaded(batches, len(parts), total, is_stacked=True)


def to_jax_arrays(batch: Batch) -> Batch:
    """Return the batch as arrays that JAX supports.

    Raises:
        ConfigError: the batch contains text, rows of different lengths, or whole numbers that need 64 bits.
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
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype and np.issubdtype(dtype, np.integer) and array.size:
        limits = np.iinfo(dtype)  # NumPy would wrap larger numbers without an error
        wrong = next((each for each in (array.min(), array.max()) if not limits.min <= each <= limits.max), None)
        if wrong is not None:
            message = (
                f"a batch has the number {wrong} in a component of type {array.dtype}, but whole numbers on JAX have "
                f"{dtype.itemsize * 8} bits; convert the component to float32, or make its numbers smaller, in the "
                "data function or `data.map`"
            )
            raise ConfigError(Problem(("data",), message))
    return array.astype(dtype, copy=False)


class StepClock:
    """Measures steps, and the time that the devices are idle because the next batch is not ready.

    JAX returns from a step before the devices have computed it, and the next batch is read meanwhile. So the time that
    Python waits for a batch does not show whether the devices wait. Therefore, in one of several steps, Python first
    waits until the devices have finished, and then measures the wait for the batch. In that step, copying the next
    batch does not overlap with computation, which is the cost of measuring.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._measured: deque[float] = deque(maxlen=_NUM_MEASUREMENTS)
        self._ends: list[tuple[float, int]] = []
        self._rows = 0

    def begin(self, feed: Feed) -> None:
        """Start a call."""
        self._ends, self._rows = [(time.perf_counter(), 0)], feed.rows

    def load_ahead(self, feed: Feed, probe: jax.Array, most: int) -> None:
        """Read the next batches, at most so many; `probe` is ready when the devices have finished all steps so far."""
        # not after the first steps, which are compiled while two batches are read
        measures = self._calls % MEASURE_EVERY == MEASURE_EVERY // 2
        self._calls += 1
        if measures:
            probe.block_until_ready()
        before = feed.waited_s
        number = feed.load_ahead(most)
        if measures and number:
            self._measured.append((feed.waited_s - before) / number)

    def steps_ended(self, number: int) -> None:
        """Record the end of some more steps of the call."""
        self._ends.append((time.perf_counter(), number))

    def times(self, feed: Feed, num_processes: int) -> StepTimes:
        """Return the times of the call."""
        # only the end of a group of steps is known, so its steps count as equally long
        groups = [((end - began) / number, number) for (began, _), (end, number) in itertools.pairwise(self._ends)]
        seconds = tuple(itertools.chain.from_iterable(itertools.repeat(each, number) for each, number in groups))
        mean = sum(self._measured) / len(self._measured) if self._measured else 0.0
        # the mean comes from other steps, so it is limited to the duration of this call
        return StepTimes(seconds, min(mean * len(seconds), sum(seconds)), (feed.rows - self._rows) / num_processes)
