"""Data whose examples are found by number as a split: a process reads and maps its own rows alone.

The order of a pass is a permutation of numbers, of which global batches and the rows of replicas are slices; only then
is anything read. So it makes no difference to a resume how far the run had come.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import joined
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch, Index
from distlaunch.data.examples.each_example import ExampleMap, batch_of, batches_at_once, first_failure, num_threads
from distlaunch.data.examples.read_failures import noted
from distlaunch.data.examples.skipping import Skipping
from distlaunch.data.graph_clock import now
from distlaunch.data.split import Split


class Examples(Protocol):
    """Examples by number, in the input pipeline.

    Attributes:
        number: how many there are.
        labels: those of all, where they are arrays; else None.
        in_python: Python code of the user's reads them.
    """

    number: int
    labels: Any
    in_python: bool

    def rows(self, indices: tf.Tensor) -> Any:
        """Return what is read best for many examples at once; each leaf has a row for each of the int64 `indices`."""
        ...

    def example(self, row: Any, number_of_pass: Index) -> Any:
        """Return an example from its row; called in parallel, and only if rows are not examples yet."""
        ...

    @property
    def whole(self) -> bool:
        """Whether `rows` returns complete examples."""
        ...

    def name(self, index: int) -> str:
        """Return the name of an example in messages."""
        ...

    def describe(self) -> str:
        """Return the description that processes compare; see `data/fingerprints.py`."""
        ...


class Indexed(Split):
    """A split of examples by number.

    A row of a row source is the number of the pass times the number of examples, plus the number of the example.

    Args:
        seed: order of the passes; None: their own.
        drop: leave out what makes no whole global batch.
        skips: leave out examples that fail; else one ends the run.
    """

    def __init__(self, examples: Examples, config: DataConfig, example_map: ExampleMap | None, seed: int | None, *,
                 drop: bool, skips: bool = False) -> None:  # fmt: skip
        self._examples, self._config, self._map, self._seed = examples, config, example_map, seed
        self._size, self._number = config.batch, examples.number
        self._used = self._number - self._number % self._size if drop else self._number
        if self._number < (self._size if drop else 1):
            raise ConfigError(Problem(("data",), f"{self._number} examples make no batch of {self._size}"))
        one = self._one_by_number
        self._skipping = Skipping(self._number, one, examples.name, config.skip_limit) if skips else None
        # workers in one process may be in two passes
        self._known_order = functools.lru_cache(maxsize=2)(self._order_in_memory)
        self._as_they_are = examples.whole and example_map is None
        self.num_examples, self.num_batches = self._number, math.ceil(self._used / self._size)
        self.empty = tf.zeros([0], tf.int64)
        self.global_batch, self.by_number, self.in_python = self._size, True, examples.in_python
        self.labels = examples.labels if example_map is None else None
        self.at_once = None if self._as_they_are else batches_at_once(config)
        self.threads = 0 if self._as_they_are else num_threads(config)
        self.work = joined([*["reading"] * (not examples.whole), *(example_map.work if example_map else ())])

    def _order(self, number_of_pass: Index) -> tf.Tensor:
        order = tf.range(self._number, dtype=tf.int64)
        if self._seed is not None:
            # stateless: the same in every process and after a resume, whatever was drawn before
            seed = [tf.constant(self._seed, tf.int64), number_of_pass]
            order = tf.random.experimental.stateless_shuffle(order, seed=seed)
        return order + number_of_pass * self._number

    @tf.autograph.experimental.do_not_convert
    def batches(self, number_of_pass: Index, start: Index) -> tf.data.Dataset:
        order = self._order(number_of_pass)[start * self._size : self._used]
        return tf.data.Dataset.from_tensor_slices(order).batch(self._size)

    def _order_in_memory(self, number_of_pass: int) -> np.ndarray:
        with tf.device("CPU:0"):
            return self._order(tf.constant(number_of_pass, tf.int64)).numpy()

    def pick(self, number_of_pass: int, index: int) -> np.ndarray:
        # a worker of servers asks for any batch, and drawing an order takes some 25 ms a million examples
        order = self._known_order(number_of_pass)
        return order[index * self._size : min((index + 1) * self._size, self._used)]

    def sample(self, number: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(tf.range(min(number, self._number), dtype=tf.int64))

    def fingerprint(self) -> str:
        return self._examples.describe()

    def read(self, rows: tf.Tensor, *, at_once: int = 1) -> Batch:
        if self._as_they_are:
            # one gather: a dataset within the pipeline would cost small models a part of their step
            return self._examples.rows(tf.math.floormod(rows, self._number))
        made = functools.partial(self._made, at_once=at_once)
        return made(rows) if self._skipping is None else self._skipping.load(rows, made)

    def _made(self, numbers: tf.Tensor, at_once: int) -> Batch:
        numbers = noted(numbers, self._first_failure)
        began = now(numbers)
        given = tf.data.Dataset.from_tensor_slices(self._given(numbers))
        threads, skips = num_threads(self._config), self._skipping is not None
        return batch_of(numbers, given, self._one, threads, began, skips=skips, at_once=at_once)

    def _given(self, numbers: tf.Tensor) -> Any:
        indices = tf.math.floormod(numbers, self._number)
        return self._examples.rows(indices), tf.math.floordiv(numbers, self._number), indices

    @tf.autograph.experimental.do_not_convert
    def _one(self, row: Any, number_of_pass: Index, index: tf.Tensor) -> Any:
        example = row if self._examples.whole else self._examples.example(row, number_of_pass)
        return example if self._map is None else self._map(example, number_of_pass, index)

    def _one_by_number(self, number: Any) -> Any:
        rows, passes, indices = self._given(tf.reshape(tf.cast(number, tf.int64), [1]))
        return self._one(tf.nest.map_structure(lambda leaf: leaf[0], rows), passes[0], indices[0])

    def _first_failure(self, numbers: np.ndarray) -> tuple[str, Exception] | None:
        examples = ((self._examples.name(int(number) % self._number), number) for number in numbers)
        return first_failure(examples, self._one_by_number)
