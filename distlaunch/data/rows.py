"""Splits global batches into rows for each replica, every example exactly once.

All workers go through the same sequence of global batches and take their own rows of each, so step k trains on the same
examples whatever the number of replicas, and all replicas come to the end of the data together.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from distlaunch.cluster.cores import num_cores
from distlaunch.data.batches import Source, num_rows, pack, slice_rows
from distlaunch.data.read_ahead import at_once, batches_ahead
from distlaunch.patches.tensorflow_iterators import untuned

_as_it_is = tf.autograph.experimental.do_not_convert
"""Decorator for functions without `if` and `while` on tensors: AutoGraph takes 10 to 40 ms to convert one."""


def split_rows(source: Source, *, first_replica: int, num_local: int, num_replicas: int) -> tf.data.Dataset:
    """Yield one element per step and local replica, in turn: `(batch, rows, total, start)`.

    The latter are scalars: `rows` and `total`, float32, examples of this replica and of the global batch; `start`,
    int64, the place of the first in it. A replica without rows (a last batch smaller than the number of replicas) gets
    the first row as a stand-in, with `rows` 0. `total` is 0 at the end of an epoch.

    If the source is process-local, `total` and `start` count what is in this process.
    """
    if source.is_process_local:
        # the others' replicas have rows of their own
        first_replica, num_replicas = 0, num_local

    @_as_it_is
    def part(element: Any, replica: Any) -> Any:
        element, total = element if source.is_process_local else (element, num_rows(element))
        replica = tf.zeros_like(replica) if num_replicas == 1 else replica
        start, stop = first_row(total, replica, num_replicas), first_row(total, replica + 1, num_replicas)
        # at the end of an epoch (total 0) nothing is needed: the loop leaves before the step
        stand_in = tf.logical_and(start == stop, num_rows(element) > 0)
        first, end = tf.where(stand_in, tf.zeros_like(start), start), tf.where(stand_in, tf.ones_like(stop), stop)
        counts = tf.cast(stop - start, tf.float32), tf.cast(total, tf.float32), start
        return slice_rows(element, first, end), *counts

    if num_local == 1:
        only = tf.constant(first_replica, tf.int64)
        parts = source.elements.map(_as_it_is(lambda *element: part(pack(element), only)))
    else:
        # one dataset for all local replicas, so that the source is read once and not once for each
        replicas = tf.data.Dataset.range(first_replica, first_replica + num_local)

        @_as_it_is
        def all_parts(*element: Any) -> tf.data.Dataset:
            return replicas.map(lambda index: part(pack(element), index))

        parts = source.elements.flat_map(all_parts)
    # an element is one replica's part of a step
    of_replica, of_process = 1 / num_replicas, min(num_local / num_replicas, 1)
    loaded = _loaded(parts, source, of_replica)
    steps = batches_ahead(*_batch(loaded, source, of_process))
    return loaded.prefetch(steps * num_local).with_options(_options(source))


def first_row(total: Any, replica: Any, num_replicas: int) -> Any:
    """Return the first row of a replica in a global batch of `total` rows; a number or a tensor."""
    # multiplied first: so the parts differ by one row at most, and cover the batch without a gap
    return total * replica // num_replicas


def own_rows(source: Source, *, first: int, number: int, of: int) -> tf.data.Dataset:
    """Return the rows of each global batch that a process needs if its devices hold some of `of` equal parts of it.

    A batch that does not divide into them is needed whole. A process-local source gives all of its rows;
    `start` is 0, `total` counts them, and a stand-in is not counted.

    Args:
        first, number: which of the parts.

    Returns:
        One element a step: `(batch, start, total)`, scalars that give the place of the batch's first row, and rows of
        the global batch, which are 0 at the end of an epoch.
    """

    @_as_it_is
    def part(*components: Any) -> Any:
        element = pack(components)
        if source.is_process_local:
            rows, total = element
            return rows, tf.zeros_like(total), total
        total = num_rows(element)
        divides = tf.equal(tf.math.floormod(total, of), 0)
        start = tf.where(divides, total // of * first, tf.zeros_like(total))
        stop = tf.where(divides, total // of * (first + number), total)
        return (element if number == of else slice_rows(element, start, stop)), start, total

    loaded = _loaded(source.elements.map(part), source, number / of)
    return loaded.prefetch(batches_ahead(*_batch(loaded, source, number / of))).with_options(_options(source))


def _loaded(parts: tf.data.Dataset, source: Source, share: float) -> tf.data.Dataset:
    """Load the row sources in `(row source, scalars)` as batches, `share` of the global ones."""

    def load(element: Any, *counts: tf.Tensor, calls: int) -> Any:
        return source.load(element, at_once=calls), *counts

    calls = source.at_once or num_cores()
    loaded = _mapped(parts, load, calls)
    # the traced function shows what a batch is; seldom is it so large that fewer must be made at the same time
    if (fewer := at_once(calls, *_batch(loaded, source, share))) < calls:
        loaded = _mapped(parts, load, fewer)
    # It is endless, which tf.data cannot see. Told so, TensorFlow's distributed iterator does not ask in every step how
    # many workers still have data; the ends that matter are marked in the data itself.
    return loaded.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _mapped(parts: tf.data.Dataset, load: Any, calls: int) -> tf.data.Dataset:
    load = functools.partial(load, calls=calls)
    return parts.map(load) if calls == 1 else parts.map(load, num_parallel_calls=calls, deterministic=True)


def _batch(loaded: tf.data.Dataset, source: Source, share: float) -> tuple[Any, int | None]:
    """Return the spec of the batch that is loaded for a step, with its rows if they are known."""
    rows = None if source.global_batch is None else math.ceil(source.global_batch * share)
    spec: Any = loaded.element_spec
    return spec[0], rows


def _options(source: Source) -> tf.data.Options:
    options = untuned()
    options.deterministic = True
    if source.threads > num_cores():
        # tf.data's own pool has as many threads as there are cores; operations that wait keep theirs
        options.threading.private_threadpool_size = source.threads
    # the rows are chosen already; TensorFlow's own sharding would deal out whole elements
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options
