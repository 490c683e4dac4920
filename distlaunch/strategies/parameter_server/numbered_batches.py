"""Reads global batches by number, for the workers of a parameter-server cluster.

Batch number k of the training data is the batch that one device would use in step k, whichever worker requests it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch, pack
from distlaunch.data.context import WorkerContext
from distlaunch.data.differences import FirstPass
from distlaunch.data.examples.example_times import not_for_training
from distlaunch.data.examples.read_failures import data_errors_raised
from distlaunch.data.read_ahead import batches_ahead
from distlaunch.data.source import Split, make_split
from distlaunch.data.splits import Splits, read_splits
from distlaunch.patches.tensorflow_iterators import untuned
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.parameter_server.worker_batches import OfferedSplit, offer

_ZERO = np.int64(0)
_SEED_STEP = 7_919  # difference between the seeds of two workers


class Reader:
    """Reads any batch of a split by its number.

    This is fast if rows can be picked by number, or if the batches are read in ascending order.

    Args:
        once: read the first pass only, instead of an endless sequence of passes.
    """

    def __init__(self, split: Split, *, once: bool) -> None:
        self._split, self._once = split, once
        self._load = split.load if split.on_host else _load_in_graph(split)
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._pass = 0
        self._end: int | None = None
        """Number of batches in the only pass, once its end was reached."""
        self.first_pass = FirstPass(split.num_batches)

    def read(self, number: int) -> Batch:
        """Return batch `number`, or one without rows after the end."""
        with tf.device("CPU:0"), data_errors_raised():
            return self._load(self._find(number))

    def _find(self, number: int) -> Any:
        split = self._split
        if split.num_batches is not None and self._once and number >= split.num_batches:
            return split.empty
        if split.by_number:
            assert split.num_batches is not None, "data whose rows can be picked has a known length"
            return split.pick(*divmod(number, split.num_batches))
        if self._end is not None and number >= self._end:
            return split.empty
        if self._iterator is None or number < self._position:
            self._begin(number)
        while True:
            element = next(self._iterator, None) if self._iterator is not None else None
            if element is None:
                if self.first_pass.length is None:
                    self.first_pass = FirstPass(self._position, self._position)
                if self._once or self._position == 0:
                    self._iterator, self._end = None, self._position
                    return split.empty
                self._pass += 1
                self._iterator = self._open(self._pass, 0)
                continue
            self._position += 1
            if self.first_pass.length is None and self._position > self.first_pass.read:
                self.first_pass = FirstPass(None, self._position)
            if self._position > number:
                return element

    def _begin(self, number: int) -> None:
        split = self._split
        self._pass = self._position = start = 0
        if split.num_batches is not None:
            self._position, (self._pass, start) = number, divmod(number, split.num_batches)
        self._iterator = self._open(self._pass, start)

    def _open(self, number_of_pass: int, start: int) -> Iterator[Any]:
        if self._split.on_host:
            return iter(self._split.batches(number_of_pass, start))
        # in a graph, as in `training_source`, because shuffling derives other seeds outside a graph
        position = tf.data.Dataset.from_tensors((np.int64(number_of_pass), np.int64(start)))
        batches = position.flat_map(lambda *at: self._split.batches(*at))
        batches = batches.map(lambda *parts: pack(parts))
        ahead = batches_ahead(batches.element_spec, self._split.global_batch)
        return iter(batches.prefetch(ahead).with_options(untuned()))


def _load_in_graph(split: Split) -> Callable[[Any], Batch]:
    """Return `split.load` as a graph function."""
    spec = tf.TensorSpec([None], tf.int64) if split.by_number else split.batches(_ZERO, _ZERO).element_spec
    return tf.function(split.load, input_signature=[spec])


class ProcessLocalReader:
    """Reads the next batch of a worker's process-local data, whatever the requested number.

    Attributes:
        first_pass: empty, because workers may have different numbers of batches.

    Args:
        num_workers: number of workers that share the batch numbers.
    """

    first_pass = FirstPass()

    def __init__(self, split: Split, num_workers: int) -> None:
        self._reader, self._num_workers = Reader(split, once=False), num_workers
        self._next: int | None = None

    def read(self, number: int) -> Batch:
        # a resumed run continues at about the same place in the worker's data
        at = number // self._num_workers if self._next is None else self._next
        self._next = at + 1
        return self._reader.read(at)


class WorkerReaders:
    """Readers for the workers of this process, each created when it is first used.

    Args:
        make: returns the reader of a worker.
        timed: whether waiting for batches counts as waiting of training steps.
    """

    def __init__(self, make: Callable[[int], Reader | ProcessLocalReader], *, timed: bool = True) -> None:
        self._make, self._timed = make, timed
        self._readers: dict[int, Reader | ProcessLocalReader] = {}

    def read(self, worker: int, number: int) -> Batch:
        if worker not in self._readers:
            self._readers[worker] = self._make(worker)
        with contextlib.nullcontext() if self._timed else not_for_training():
            return self._readers[worker].read(number)

    def first_pass(self, worker: int) -> FirstPass:
        return self._readers[worker].first_pass if worker in self._readers else FirstPass()

    def as_offered_split(self, split: Split, length: int | None, *, keeps_last: bool = False) -> OfferedSplit:
        return OfferedSplit(self.read, length, split.describe, self.first_pass, keeps_last)


def offer_splits(
    config: RunConfig, splits: Splits, train: Split, validation: Split | None, context: WorkerContext | None = None
) -> None:
    """Make the splits readable by number for workers in this process, in the order that the config asks for.

    Args:
        train, validation: made with `on_host=True`, because TensorFlow takes ten times as long to find the rows of a
            batch in arrays, and workers wait for it.
        context: with `data.sharding: function`, the worker whose data the splits are.
    """
    length = None if config.data.sharding == "function" else train.num_batches
    is_checked = config.train.check != "off"
    readers = _train_readers(config, splits, train, context)
    offer("train", readers.as_offered_split(train, length, keeps_last=is_checked))
    ordered = train.in_order()
    once = WorkerReaders(lambda _: Reader(ordered, once=True), timed=False)
    offer("train:once", once.as_offered_split(ordered, ordered.num_batches))
    if validation is not None:
        readers = WorkerReaders(lambda _: Reader(validation, once=True), timed=False)
        own = readers.as_offered_split(validation, validation.num_batches, keeps_last=is_checked)
        offer("validation:once", own)


def _train_readers(config: RunConfig, splits: Splits, train: Split, context: WorkerContext | None) -> WorkerReaders:
    def made(data: Any, seed: int) -> Split:
        layer = splits.preprocessing
        return make_split(data, config.data, seed=seed, training=True, preprocessing=layer, on_host=True)

    def drawing(worker: int) -> Reader:
        # `worker + 1`, so that no worker has the run's seed, which is for an order that all workers share
        return Reader(made(splits.train, config.seed + _SEED_STEP * (worker + 1)), once=False)

    def own(worker: int) -> ProcessLocalReader:
        assert context is not None, "only workers of a coordinator read by number"
        split = train
        if worker != context.worker:  # another worker in this process
            other = read_splits(config.data, replace(context, worker=worker))
            split = made(other.train, config.seed)
        return ProcessLocalReader(split, context.num_workers)

    make = {"function": own, "shuffled": drawing}.get(config.data.sharding, lambda _: Reader(train, once=False))
    return WorkerReaders(make)
