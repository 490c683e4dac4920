"""Makes a pipeline that shuffles its own data start at any pass, with the order of an uninterrupted run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol
from distlaunch.patches.tensorflow_late import not_converted, tf

_SHUFFLE = Symbol(
    "tensorflow.data.Dataset.shuffle", "(self, buffer_size, seed=None, reshuffle_each_iteration=True, name=None)"
)
_SEEDS = Symbol("tensorflow.python.data.util.random_seed.get_seed", "(seed)")
_VARIANT = Symbol("tensorflow.data.Dataset._variant_tensor")
_INPUTS = Symbol("tensorflow.data.Dataset._inputs", "(self)")
_REPEAT = Symbol("tensorflow.python.data.ops.repeat_op._RepeatDataset")
_CACHE = Symbol("tensorflow.python.data.ops.cache_op.CacheDataset")
_CONCATENATE = Symbol("tensorflow.python.data.ops.concatenate_op._ConcatenateDataset")

PATCH = Patch(
    symbols=(_SHUFFLE, _SEEDS, _VARIANT, _INPUTS, _REPEAT, _CACHE, _CONCATENATE),
    why="A dataset that reshuffles in each iteration draws the order from a state that cannot be set. So a resumed run "
    "reads examples in a different order from an uninterrupted one, and two readers of a dataset see different orders.",
    until="The state of `Dataset.shuffle` can be set.",
)

_PHILOX = 1
_MARK = "_distlaunch_shuffle"


@dataclass(frozen=True)
class Shuffle:
    """The orders of one call of `.shuffle()`.

    Attributes:
        iterations: number of iterations that have begun, an int64 variable. Iteration k has the order that TensorFlow
            gives to the k-th iteration in a process.
        before: the dataset that is shuffled.
        settled: number of iterations that had begun when the data function returned; set once.
    """

    iterations: tf.Variable
    before: tf.data.Dataset
    settled: list[int]


@dataclass(frozen=True)
class Place:
    """A call of `.shuffle()` in a pipeline.

    Attributes:
        in_pass: number of its iterations that begin while an iterator of the pipeline is read to the end.
        unread: number of its iterations that begin if an iterator of the pipeline is created but not read.
    """

    shuffle: Shuffle
    in_pass: int
    unread: int


@dataclass(frozen=True)
class Shuffles:
    """The calls of `.shuffle()` in a pipeline that reshuffle in each iteration.

    Attributes:
        places: the calls.
        has_spares: whether Keras's `fit` creates one more iterator after each pass, and never reads it. If `fit` knows
            the number of batches, and `steps_per_epoch` is not set, it prepares an iterator at the end of each epoch,
            and replaces it when the next epoch begins. See
            `keras.src.trainers.epoch_iterator.EpochIterator._enumerate_iterator`.
    """

    places: tuple[Place, ...]
    has_spares: bool = False

    def share(self, other: Shuffles) -> bool:
        """Return whether both pipelines contain the same call."""
        return any(mine.shuffle is theirs.shuffle for mine in self.places for theirs in other.places)

    def begin(self, number_of_pass: Any) -> None:
        """Make the next iteration the first one of a pass. This also works in a graph."""
        passes = tf.cast(number_of_pass, tf.int64)
        for place in self.places:
            settled = tf.constant(place.shuffle.settled[0], tf.int64)
            each = place.in_pass + (place.unread if self.has_spares else 0)
            place.shuffle.iterations.assign(settled + passes * each)

    def in_pass(self, dataset: tf.data.Dataset, number_of_pass: Any) -> tf.data.Dataset:
        """Return the examples of one pass of the pipeline that contains these shuffles."""
        if not self.places:
            return dataset

        @not_converted
        def begun(number: tf.Tensor) -> tf.data.Dataset:
            self.begin(number)
            return dataset

        return tf.data.Dataset.from_tensors(tf.cast(number_of_pass, tf.int64)).flat_map(begun)


@functools.cache
def count_iterations() -> None:
    """Make each later `.shuffle()` count its iterations, with the orders that TensorFlow gives them."""
    PATCH.check()
    tf.data.Dataset.shuffle = _shuffle


def shuffles_of(dataset: tf.data.Dataset, *, epoch_steps: int | None = None) -> Shuffles:
    """Return the shuffles in a pipeline. Call it only after the data function has returned the pipeline.

    Args:
        epoch_steps: number of batches of an epoch, if the config sets it.
    """
    _INPUTS.get()
    places: dict[int, Place] = {}
    for shuffle, in_pass, unread in _shuffles_in(dataset, 1, 1):
        before = places.get(id(shuffle), Place(shuffle, 0, 0))
        places[id(shuffle)] = Place(shuffle, before.in_pass + in_pass, before.unread + unread)
        if not shuffle.settled:
            shuffle.settled.append(int(shuffle.iterations))
    return Shuffles(tuple(places.values()), epoch_steps is None and int(dataset.cardinality()) >= 0)


def shuffled_by(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Return the dataset that is shuffled if this one is the result of `.shuffle()`, else None."""
    shuffle = getattr(dataset, _MARK, None)
    return None if shuffle is None else shuffle.before


def _shuffles_in(dataset: tf.data.Dataset, iterations: int, unread: int) -> Iterator[tuple[Shuffle, int, int]]:
    """Yield each shuffle in a pipeline, with its number of iterations per pass and per unread iterator."""
    shuffle = getattr(dataset, _MARK, None)
    if shuffle is not None:
        yield shuffle, iterations, unread
        # TensorFlow's shuffle creates the iterator of its input only when the shuffle is read
        yield from _shuffles_in(shuffle.before, iterations, 0)
        return
    if isinstance(dataset, _REPEAT.get()):
        iterations *= max(int(dataset._count), 1)
    elif isinstance(dataset, _CACHE.get()):
        iterations = unread = 0  # only the first pass reads the datasets before the cache
    for number, each in enumerate(dataset._inputs()):
        # the iterator of a second dataset is created after the first one has been read
        is_later = number > 0 and isinstance(dataset, _CONCATENATE.get())
        yield from _shuffles_in(each, iterations, 0 if is_later else unread)


def _shuffle(
    self: tf.data.Dataset, buffer_size: Any, seed: Any = None, reshuffle_each_iteration: bool | None = True,
    name: str | None = None,
) -> tf.data.Dataset:  # fmt: skip
    if reshuffle_each_iteration is False or not tf.executing_eagerly():
        return _SHUFFLE.get()(self, buffer_size, seed, reshuffle_each_iteration, name)
    own, operation = _SEEDS.get()(seed)
    with tf.device("CPU:0"):
        iterations = tf.Variable(tf.constant(0, tf.int64), trainable=False)
    shape = tf.data.experimental.get_structure(self)

    @not_converted
    def one(_: tf.Tensor) -> tf.data.Dataset:
        seeds = _drawn(own, operation, iterations.assign_add(1) - 1)
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=self._variant_tensor,
            buffer_size=tf.cast(buffer_size, tf.int64),
            seed=seeds[0],
            seed2=seeds[1],
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            reshuffle_each_iteration=False,
            output_types=[tf.variant],
            output_shapes=[tf.TensorShape([])],
        )
        return tf.data.experimental.from_variant(variant, shape)

    shuffled = tf.data.Dataset.range(1).flat_map(one)
    if (cardinality := int(self.cardinality())) != tf.data.UNKNOWN_CARDINALITY:
        shuffled = shuffled.apply(tf.data.experimental.assert_cardinality(cardinality))
    setattr(shuffled, _MARK, Shuffle(iterations, self, []))
    return shuffled


def _drawn(seed: tf.Tensor, operation: tf.Tensor, iteration: tf.Tensor) -> tf.Tensor:
    """Return the two seeds that TensorFlow's `RandomSeedGenerator` draws for an iteration; int64, shape [2]."""
    # each iteration takes two of the four 32-bit numbers in a block of Philox
    counter = tf.stack([tf.bitcast(iteration // 2, tf.uint64), tf.bitcast(operation, tf.uint64)])
    block = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4], key=[tf.bitcast(seed, tf.uint64)], counter=counter, alg=_PHILOX, dtype=tf.uint32
    )
    return tf.cast(tf.reshape(block, [2, 2])[tf.cast(tf.math.floormod(iteration, 2), tf.int32)], tf.int64)
