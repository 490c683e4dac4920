"""Split whose examples are read by number; a process reads and maps only its own rows.

The order of a pass is a permutation of numbers. Global batches and the rows of replicas are slices of this permutation,
and only the examples of such a slice are read. So a resume takes equally long at any position.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import joined
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch, Index
from distlaunch.data.examples.each_example import ExampleMap, batch_of, first_failure, num_parallel_batches, num_threads
from distlaunch.data.examples.read_failures import remember_rows
from distlaunch.data.examples.skipping import GraphSkipping
from distlaunch.data.graph_clock import now
from distlaunch.data.seeds import shuffle_numbers
from distlaunch.data.split import Split
from distlaunch.patches.tensorflow_late import not_converted, tf


class Examples(Protocol):
    """Examples by number, in the input pipeline.

    Attributes:
        number: number of examples.
        labels: labels of all examples if they are arrays, else None.
        in_python: whether Python code of the user reads the examples.
    """

    number: int
    labels: Any
    in_python: bool

    def rows(self, indices: tf.Tensor) -> Any:
        """Return a structure with one row for each of the int64 `indices`, read for all of them together."""
        ...

    def example(self, row: Any, number_of_pass: Index) -> Any:
        """Return an example from its row; called in parallel, and only if `whole` is false."""
        ...

    @property
    def whole(self) -> bool:
        """True if `rows` returns complete examples."""
        ...

    def name(self, index: int) -> str:
        """Return the name of an example in messages."""
        ...

    def describe(self) -> str:
        """Return the description that processes compare; see `data/fingerprints.py`."""
        ...


class Indexed(Split):
    """A split of examples by number.

    In a row source, each row is one integer: index of the pass * number of examples + index of the example.

    Args:
        seed: seed of the order of each pass; None for the data's order.
        drop: whether to drop a last batch that is not full.
        skips: whether to skip examples that fail; otherwise a failure ends the run.
    """

    def __init__(self, examples: Examples, config: DataConfig, example_map: ExampleMap | None, seed: int | None, *,
                 drop: bool, skips: bool = False) -> None:  # fmt: skip
        self._examples, self._config, self._map, self._seed = examples, config, example_map, seed
        self._size, self._number = config.batch, examples.number
        self._used = self._number - self._number % self._size if drop else self._number
        if self._number < (self._size if drop else 1):
            raise ConfigError(Problem(("data",), f"{self._number} examples are too few for a batch of {self._size}"))
        one = self._make_example_by_number
        self._skipping = GraphSkipping(self._number, one, examples.name, config.skip_limit) if skips else None
        # 2, because workers in one process may be in two passes
        self._known_order = functools.lru_cache(maxsize=2)(self._order_in_memory)
        self._returns_rows_directly = examples.whole and example_map is None
        self.num_examples, self.num_batches = self._number, math.ceil(self._used / self._size)
        self.empty = tf.zeros([0], tf.int64)
        self.global_batch, self.by_number, self.in_python = self._size, True, examples.in_python
        self.labels = examples.labels if example_map is None else None
        self.at_once = None if self._returns_rows_directly else num_parallel_batches(config)
        self.threads = 0 if self._returns_rows_directly else num_threads(config)
        self.work = joined([*["reading"] * (not examples.whole), *(example_map.work if example_map else ())])

    def _order(self, number_of_pass: Index) -> tf.Tensor:
        order = tf.range(self._number, dtype=tf.int64)
        if self._seed is not None:
            # stateless, so that the order is the same in every process and after a resume
            seed = [tf.constant(self._seed, tf.int64), number_of_pass]
            order = shuffle_numbers(order, seed=seed)
        return order + number_of_pass * self._number

    @not_converted
    def batches(self, number_of_pass: Index, start: Index) -> tf.data.Dataset:
        order = self._order(number_of_pass)[start * self._size : self._used]
        return tf.data.Dataset.from_tensor_slices(order).batch(self._size)

    def _order_in_memory(self, number_of_pass: int) -> np.ndarray:
        with tf.device("CPU:0"):
            return self._order(tf.constant(number_of_pass, tf.int64)).numpy()

    def pick(self, number_of_pass: int, index: int) -> np.ndarray:
        # the order is cached, because drawing it takes about 25 ms for a million examples
        order = self._known_order(number_of_pass)
        return order[index * self._size : min((index + 1) * self._size, self._used)]

    def sample(self, number: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(tf.range(min(number, self._number), dtype=tf.int64))

    def fingerprint(self) -> str:
        return self._examples.describe()

    def read(self, rows: tf.Tensor, *, at_once: int = 1) -> Batch:
        if self._returns_rows_directly:
            # a single gather, because a dataset within the pipeline would slow down small models
            return self._examples.rows(tf.math.floormod(rows, self._number))
        made = functools.partial(self._make_batch, at_once=at_once)
        return made(rows) if self._skipping is None else self._skipping.load(rows, made)

    def _make_batch(self, numbers: tf.Tensor, at_once: int) -> Batch:
        numbers = remember_rows(numbers, self._first_failure)
        began = now(numbers)
        given = tf.data.Dataset.from_tensor_slices(self._row_arguments(numbers))
        threads, skips = num_threads(self._config), self._skipping is not None
        return batch_of(numbers, given, self._make_example, threads, began, skips=skips, at_once=at_once)

    def _row_arguments(self, numbers: tf.Tensor) -> Any:
        indices = tf.math.floormod(numbers, self._number)
        return self._examples.rows(indices), tf.math.floordiv(numbers, self._number), indices

    @not_converted
    def _make_example(self, row: Any, number_of_pass: Index, index: tf.Tensor) -> Any:
        example = row if self._examples.whole else self._examples.example(row, number_of_pass)
        return example if self._map is None else self._map(example, number_of_pass, index)

    def _make_example_by_number(self, number: Any) -> Any:
        rows, passes, indices = self._row_arguments(tf.reshape(tf.cast(number, tf.int64), [1]))
        return self._make_example(tf.nest.map_structure(lambda leaf: leaf[0], rows), passes[0], indices[0])

    def _first_failure(self, numbers: np.ndarray) -> tuple[str, Exception] | None:
        examples = ((self._examples.name(int(number) % self._number), number) for number in numbers)
        return first_failure(examples, self._make_example_by_number)
