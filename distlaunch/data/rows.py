"""Splits global batches into rows for each replica, with every example exactly once.

All workers go through the same sequence of global batches, and each takes its own rows. So step k trains on the same
examples whatever the number of replicas, and all replicas reach the end of the data together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from distlaunch.cluster.cores import num_cores
from distlaunch.data.batches import Source, num_rows, pack, slice_rows
from distlaunch.data.read_ahead import batches_ahead, limit_by_bytes
from distlaunch.patches.tensorflow_iterators import untuned
from distlaunch.patches.tensorflow_late import not_converted, tf


def split_rows(source: Source, *, first_replica: int, num_local: int, num_replicas: int) -> tf.data.Dataset:
    """Return a dataset with one element `(batch, rows, total, start)` for each step and local replica in turn.

    `rows` and `total` are float32 scalars: the numbers of examples of this replica and of the global batch. `start` is
    an int64 scalar, the index of the replica's first example in the global batch. If the last batch is smaller than the
    number of replicas, a replica without rows gets the first row as a stand-in, with `rows` 0. `total` is 0 at the end
    of an epoch.

    If the source is process-local, `total` and `start` refer to the rows of this process.
    """
    if source.is_process_local:
        # the source has only this process's rows, so only its own replicas divide them
        first_replica, num_replicas = 0, num_local

    @not_converted
    def part(element: Any, replica: Any) -> Any:
        element, total = element if source.is_process_local else (element, num_rows(element))
        replica = tf.zeros_like(replica) if num_replicas == 1 else replica
        start, stop = first_row(total, replica, num_replicas), first_row(total, replica + 1, num_replicas)
        # no stand-in at the end of an epoch (total 0), where the loop ends before the step
        stand_in = tf.logical_and(start == stop, num_rows(element) > 0)
        first, end = tf.where(stand_in, tf.zeros_like(start), start), tf.where(stand_in, tf.ones_like(stop), stop)
        counts = tf.cast(stop - start, tf.float32), tf.cast(total, tf.float32), start
        return slice_rows(element, first, end), *counts

    if num_local == 1:
        only = tf.constant(first_replica, tf.int64)
        parts = source.elements.map(not_converted(lambda *element: part(pack(element), only)))
    else:
        # one dataset for all local replicas, so that the source is read only once
        replicas = tf.data.Dataset.range(first_replica, first_replica + num_local)

        @not_converted
        def all_parts(*element: Any) -> tf.data.Dataset:
            return replicas.map(lambda index: part(pack(element), index))

        parts = source.elements.flat_map(all_parts)
    # an element is one replica's part of a step
    of_replica, of_process = 1 / num_replicas, min(num_local / num_replicas, 1)
    loaded = _load_batches(parts, source, of_replica, _place_of_replica, num_local)
    steps = batches_ahead(*_spec_and_rows(loaded, source, of_process))
    return loaded.prefetch(steps * num_local).with_options(_options(source))


def _place_of_replica(batch: Any, rows: Any, total: Any, start: Any) -> tuple[Any, Any, Any]:
    del batch  # `rows` is given, because a batch without rows contains a stand-in row
    return start, tf.cast(rows, tf.int64), tf.cast(total, tf.int64)


def first_row(total: Any, replica: Any, num_replicas: int) -> Any:
    """Return the index of a replica's first row in a global batch of `total` rows, as a number or a tensor."""
    # multiplying before dividing makes the parts differ by at most one row
    return total * replica // num_replicas


def rows_of_process(source: Source, *, first: int, number: int, of: int) -> tf.data.Dataset:
    """Return the rows of each global batch that a process needs for its devices on a mesh.

    If the number of rows is not divisible by the number of parts, the process needs the whole batch.

    Args:
        first: index of the first part of a batch that the devices of this process hold.
        number: number of parts that these devices hold.
        of: number of equal parts of a batch.

    Returns:
        A dataset with one element `(batch, start, total)` for each step. `start` is the index of the batch's first row
        in the global batch. `total` is the number of rows of the global batch, 0 at the end of an epoch. If the source
        is process-local, `start` is 0 and `total` is the number of rows of this process, without a stand-in.
    """

    @not_converted
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

    loaded = _load_batches(source.elements.map(part), source, number / of, _place_on_mesh, 1)
    return loaded.prefetch(batches_ahead(*_spec_and_rows(loaded, source, number / of))).with_options(_options(source))


def _place_on_mesh(batch: Any, start: Any, total: Any) -> tuple[Any, Any, Any]:
    return start, num_rows(batch), total


def _load_batches(
    parts: tf.data.Dataset, source: Source, share: float, place: Callable[..., Any], parts_per_batch: int
) -> tf.data.Dataset:
    """Load the row sources of elements `(row source, scalars)` as batches.

    Args:
        share: fraction of a global batch in each element.
        place: returns start, rows and total of a loaded element, for a source that is recorded.
        parts_per_batch: number of elements that make up a batch.
    """

    def load(element: Any, *counts: tf.Tensor, calls: int) -> Any:
        return source.load(element, at_once=calls), *counts

    def load_numbered(number: tf.Tensor, element: Any, *, calls: int) -> Any:
        loaded = load(*element, calls=calls)
        assert source.record is not None, "otherwise elements have no numbers"
        source.record(number // parts_per_batch, loaded[0], *place(*loaded))
        return loaded

    make = load
    if source.record is not None:
        parts, make = parts.enumerate(), load_numbered
    calls = source.at_once or num_cores()
    loaded = _map_in_parallel(parts, make, calls)
    # the trace shows the size of a batch; if batches are very large, fewer are loaded at the same time
    if (fewer := limit_by_bytes(calls, *_spec_and_rows(loaded, source, share))) < calls:
        loaded = _map_in_parallel(parts, make, fewer)
    # The dataset is endless, but tf.data does not know it. With this assertion, TensorFlow's distributed iterator does
    # not check in every step how many workers still have data. Elements without rows mark the ends.
    return loaded.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _map_in_parallel(parts: tf.data.Dataset, load: Any, calls: int) -> tf.data.Dataset:
    load = functools.partial(load, calls=calls)
    return parts.map(load) if calls == 1 else parts.map(load, num_parallel_calls=calls, deterministic=True)


def _spec_and_rows(loaded: tf.data.Dataset, source: Source, share: float) -> tuple[Any, int | None]:
    """Return the spec of the batch that is loaded for a step, and its number of rows, or None if unknown."""
    rows = None if source.global_batch is None else math.ceil(source.global_batch * share)
    spec: Any = loaded.element_spec
    return spec[0], rows


def _options(source: Source) -> tf.data.Options:
    options = untuned()
    options.deterministic = True
    if source.threads > num_cores():
        # tf.data's own pool has one thread for each core, and operations that wait occupy threads
        options.threading.private_threadpool_size = source.threads
    # the rows are selected already, and TensorFlow's own sharding would distribute whole elements
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options
