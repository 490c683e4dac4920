"""Split of a user's `tf.data.Dataset`; every process reads it, but maps only its own rows.

Before `data.map`, each example is represented by one variant tensor, a dataset with this single example. This works for
examples of any structure, and of different shapes. It needs no copy, and batches of variants can be sliced into the
rows of replicas.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import joined
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch, Index, num_rows, slice_rows
from distlaunch.data.context import StreamContext
from distlaunch.data.examples.each_example import (
    ExampleMap,
    batch_of,
    empty_value,
    first_failure,
    num_parallel_batches,
    num_threads,
    unpack_arguments,
)
from distlaunch.data.examples.read_failures import Find, remember_rows
from distlaunch.data.fingerprints import fingerprint
from distlaunch.data.graph_clock import now
from distlaunch.data.seeds import seed_of_pass
from distlaunch.data.split import Batching, Split
from distlaunch.patches.tensorflow_late import not_converted, tf
from distlaunch.patches.tensorflow_private import batching_of
from distlaunch.patches.tensorflow_shuffle import shuffles_of

_ZERO = np.int64(0)
SINGLE_STREAM = StreamContext(num_streams=1, stream=0)
BUFFER = 10_000
"""Largest number of examples in the buffer of `shuffle: true`."""
_HEAD = 4
"""Number of examples that are read to find shapes, sizes and a fingerprint."""


class Pipeline(Split):
    """A split whose data is a `tf.data` pipeline of examples, or of global batches with `batched: true`.

    Args:
        seed: seed of the order of each pass; None for the pipeline's order.
        drop: whether to drop a last batch that is not full.
        stream: the stream to which the examples belong.
        epoch_steps: number of batches of an epoch, if the config sets it.

    Raises:
        ConfigError: there is not a single batch, or each example contains a dataset.
    """

    def __init__(self, dataset: tf.data.Dataset, config: DataConfig, limit: int | None,
                 example_map: ExampleMap | None, seed: int | None, *, drop: bool,
                 stream: StreamContext = SINGLE_STREAM, epoch_steps: int | None = None) -> None:  # fmt: skip
        if limit is not None:
            dataset = dataset.take(math.ceil(limit / config.batch) if config.batched else limit)
        self._dataset, self._config, self._seed, self._drop = dataset, config, seed, drop
        self._shuffles = shuffles_of(dataset, epoch_steps=epoch_steps)
        self._map = None if config.batched else example_map
        self._stream = stream
        self._set_facts()

    def _set_facts(self) -> None:
        config, dataset = self._config, self._dataset
        if any(isinstance(leaf, tf.data.DatasetSpec) for leaf in tf.nest.flatten(dataset.element_spec)):
            hint = "add `.flat_map(...)` to the pipeline, such as `.flat_map(lambda window: window.batch(8))`"
            message = f"each example contains a dataset, as after `.window()`; {hint}"
            raise ConfigError(Problem(("data", "function"), message))
        length = int(dataset.cardinality())
        known = length if length >= 0 else None
        count = known
        if known is not None and not config.batched:
            count = known // config.batch if self._drop else math.ceil(known / config.batch)
        if count == 0 and self._stream is SINGLE_STREAM:  # `Streams` checks its streams itself
            raise ConfigError(Problem(("data",), f"{known} examples are too few for a batch of {config.batch}"))
        self.num_examples = None if config.batched else known
        self.num_batches = None if self._drop and config.batched else count
        rows = dataset if config.batched else self._to_row_sources(dataset, _ZERO).batch(1)
        self.empty = tf.nest.map_structure(empty_value, rows.element_spec)
        self.endless = length == tf.data.INFINITE_CARDINALITY
        self.global_batch = config.batch
        self.can_compare_rows = _is_plain(dataset.element_spec)
        if self._map is not None:
            self.at_once, self.threads = num_parallel_batches(config), num_threads(config)
            self.work = joined(self._map.work)

    def buffer(self) -> tuple[int, int]:
        known = int(self._dataset.cardinality())
        held = 0 if self._seed is None or self._config.batched else self._buffer
        held = min(held, known) if known >= 0 else held
        return held, held * self._example_bytes if held else 0

    def batching(self) -> Batching | None:
        if self._config.batched is not None or not self.head:
            return None
        first, *others = (
            {leaf.shape[0] if leaf.shape.rank else None for leaf in tf.nest.flatten(element)} for element in self.head
        )
        rows = first.pop()
        if first or rows is None:
            return None
        how, several = batching_of(self._dataset), len(tf.nest.flatten(self.head[0])) > 1
        is_open = all(leaf.shape[0] is None for leaf in tf.nest.flatten(self._dataset.element_spec))
        # if `data.map` follows, `.batch()` may have divided text into sequences of equal length, which are not batches
        mapped_later = self._map is not None
        seen = (is_open and (several or not mapped_later)) or (how == "last" and several and not mapped_later)
        is_even = all(sizes == {rows} for sizes in others)
        return Batching(int(rows), is_certain=how is not None and seen, is_even=is_even)

    def is_found_empty(self) -> bool:
        return self.num_batches is None and not self.endless and not self.head

    def rows_of_own_batches(self) -> int | None:
        if not self._config.batched or batching_of(self._dataset) is None:
            return None
        sizes = [int(num_rows(batch)) for batch in self.head]
        # the last batch may be smaller; batches of several sizes are made on purpose
        return sizes[0] if len(sizes) > 1 and len(set(sizes[:-1])) == 1 else None

    # order

    def batches(self, number_of_pass: Index, start: Index) -> tf.data.Dataset:
        # makes the order of the user's own shuffles depend on the pass only, and not on earlier reads
        rows = self._shuffles.in_pass(self._dataset, number_of_pass)
        if not self._config.batched:
            rows = self._shuffled(self._to_row_sources(rows, number_of_pass), number_of_pass).batch(self._config.batch)
        if self._drop:
            rows = rows.filter(unpack_arguments(lambda batch: num_rows(batch) == self._config.batch))
        return rows.skip(start)

    def _shuffled(self, examples: tf.data.Dataset, number_of_pass: Index) -> tf.data.Dataset:
        if self._seed is None:
            return examples
        if not tf.executing_eagerly():
            # sets a seed for the graph, because without one TensorFlow compares the operation's seed, a tensor, with 0
            tf.random.set_seed(self._seed + 1)
        order: Any = seed_of_pass(self._seed, number_of_pass) * self._stream.num_streams + self._stream.stream
        return examples.shuffle(self._buffer, seed=order, reshuffle_each_iteration=False)

    @functools.cached_property
    def _buffer(self) -> int:
        """Size of the shuffle buffer; it depends on the first examples only, so that it is equal in all processes."""
        most = self._config.shuffle_buffer_bytes
        if self._config.shuffle is not True:
            return max(1, int(self._config.shuffle) // self._stream.num_streams)
        return max(1, min(BUFFER, most // max(self._example_bytes, 1)) // self._stream.num_streams)

    @functools.cached_property
    def _example_bytes(self) -> int:
        """Bytes of one example, before `data.map`."""
        size = _num_bytes(self._dataset.element_spec)
        if size is not None:
            return size
        sizes = [sum(map(_leaf_bytes, tf.nest.flatten(one, expand_composites=True))) for one in self.head]
        return math.ceil(sum(sizes) / max(len(sizes), 1))

    @functools.cached_property
    def head(self) -> list[Any]:
        """The first few examples."""
        with tf.device("CPU:0"):
            return list(self._shuffles.in_pass(self._dataset, _ZERO).take(_HEAD))

    # rows

    def identify_rows(self, rows: Any) -> Any:
        if self._map is None:
            return super().identify_rows(rows)
        number, spec = num_rows(rows), self._example_spec
        places = (tf.zeros_like(number), number - 1)
        return [tf.data.experimental.from_variant(rows[0][at], spec).get_single_element() for at in places], number

    @property
    def _example_spec(self) -> Any:
        """Spec of one example as functions get it; a row of a ragged tensor is a dense tensor of any length."""

        def plain(leaf: Any) -> Any:
            is_row = isinstance(leaf, tf.RaggedTensorSpec) and leaf.ragged_rank == 0  # pyright: ignore[reportAttributeAccessIssue]
            return tf.TensorSpec(leaf.shape, leaf.dtype) if is_row else leaf

        return tf.nest.map_structure(plain, self._dataset.element_spec)

    def _to_row_sources(self, examples: tf.data.Dataset, number_of_pass: Index) -> tf.data.Dataset:
        """Return each example as a row of a row source; with a map, a row also has the indices of pass and example."""
        if self._map is None:
            return examples

        @not_converted
        def row(index: tf.Tensor, example: Any) -> Any:
            one = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(example))
            number = index * self._stream.num_streams + self._stream.stream
            return one, tf.stack([tf.cast(number_of_pass, tf.int64), number])

        return examples.enumerate().map(row)

    def read(self, rows: Any, *, at_once: int = 1) -> Batch:
        return self.read_with(self.first_failure, rows, at_once)

    def read_with(self, find: Find, rows: Any, at_once: int) -> Batch:
        """Read rows of all streams; see `read()`.

        Args:
            find: returns the first of the rows that fails, in any stream.
        """
        spec = self._example_spec
        if self._map is None:
            return rows
        rows = rows[0], remember_rows(rows[1], find)

        @not_converted
        def example(*row: Any) -> tf.data.Dataset:
            variant, key = row
            one = tf.data.experimental.from_variant(variant, spec)
            return tf.data.Dataset.zip((one, tf.data.Dataset.from_tensors(key)))

        examples = tf.data.Dataset.from_tensor_slices(rows).flat_map(example)
        return batch_of(rows, examples, self._make_example, num_threads(self._config), now(rows[1]), at_once=at_once)

    @not_converted
    def _make_example(self, example: Any, key: tf.Tensor) -> Any:
        assert self._map is not None
        return self._map(example, key[0], key[1])

    def first_failure(self, keys: np.ndarray) -> tuple[str, Exception] | None:
        """Return the first row of this stream that fails, or None; see `read_failures.Find`."""
        number, stream = self._stream.num_streams, self._stream.stream
        wanted = {int(key[1]) // number: tf.constant(key) for key in keys if key[1] % number == stream}
        number_of_pass = next((key[0] for key in keys if key[1] % number == stream), _ZERO)
        examples = self._shuffles.in_pass(self._dataset, number_of_pass)
        read = zip(range(max(wanted, default=-1) + 1), examples, strict=False)
        where = "the pipeline" if number == 1 else f"stream {stream}"
        named = ((f"example {at} of {where}", (one, wanted[at])) for at, one in read if at in wanted)
        return first_failure(named, lambda given: self._make_example(*given))

    def sample(self, number: int) -> tf.data.Dataset:
        if self._config.batched:
            first = self._shuffles.in_pass(self._dataset, _ZERO).take(1)
            return first.map(unpack_arguments(lambda batch: slice_rows(batch, 0, number)))
        if not self.head:
            return self._dataset.take(0)
        if any(isinstance(leaf, tf.RaggedTensorSpec) for leaf in tf.nest.flatten(self._dataset.element_spec)):
            # two examples may be tensors of different lengths, which cannot be concatenated as datasets
            return self._to_row_sources(self._dataset.take(number), _ZERO).batch(number)
        first, *others = (tf.data.Dataset.from_tensors(example) for example in self.head[:number])
        for other in others:
            first = first.concatenate(other)
        return self._to_row_sources(first, _ZERO).batch(number)

    def fingerprint(self) -> str:
        if self._config.batched:
            return fingerprint([], self._dataset.element_spec)
        shuffle = "none" if self._seed is None else f"within {self._buffer:,} examples"
        return fingerprint(self.head, self._dataset.element_spec, shuffle=shuffle)


def _num_bytes(spec: Any) -> int | None:
    """Return the bytes of an example, or None if its type does not determine them."""
    total = 0
    for leaf in tf.nest.flatten(spec, expand_composites=True):
        if leaf.dtype in (tf.string, tf.variant) or not leaf.shape.is_fully_defined():
            return None
        total += leaf.shape.num_elements() * leaf.dtype.size
    return total


def _is_plain(spec: Any) -> bool:
    """Return whether Python can read all values of an example; it cannot read nested datasets."""
    return all(leaf.dtype != tf.variant for leaf in tf.nest.flatten(spec, expand_composites=True))


def _leaf_bytes(leaf: Any) -> int:
    values = np.asarray(leaf)
    return sum(map(len, values.flat)) if values.dtype == object else values.nbytes
