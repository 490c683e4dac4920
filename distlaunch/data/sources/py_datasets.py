"""Split of a `keras.utils.PyDataset`, whose items are global batches; every process reads them as a whole.

`on_epoch_begin` and `on_epoch_end` may change the items, so a pass depends on the calls for all passes before it. After
a resume, both are called for each skipped pass.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, DataError, Problem
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch, Index, num_rows
from distlaunch.data.examples.each_example import empty_value, unpack_arguments
from distlaunch.data.examples.python_values import as_array, as_arrays
from distlaunch.data.examples.read_failures import reading
from distlaunch.data.fingerprints import fingerprint
from distlaunch.data.seeds import shuffle_numbers
from distlaunch.data.split import Split
from distlaunch.data.splits import PyData
from distlaunch.data.structures import ArraySpec, flatten, map_structure, pack
from distlaunch.patches.tensorflow_late import not_converted, tf

_KEY = ("data", "function")
_BEGIN, _END, _ITEM, _FIRST = range(4)
"""Parts of the seeds of random generators: each stands for a place in the dataset's code that may draw."""


class PyDatasets(Split):
    """Split of a `keras.utils.PyDataset`.

    Args:
        limit: largest number of examples, rounded up to whole batches; None for all.
        seed: the run's seed.
        shuffle: whether to read the batches of each pass in an order that depends on the seed and the pass.
        trains: whether to call both hooks for each pass, as `fit` does; otherwise only `on_epoch_begin`, once.
        drop: whether to drop batches that are smaller than the first.
        epoch_steps: number of batches in an epoch, for a dataset without an end.
    """

    def __init__(self, data: PyData, config: DataConfig, limit: int | None, seed: int, *, shuffle: bool, trains: bool,
                 drop: bool, epoch_steps: int | None) -> None:  # fmt: skip
        self._data, self._config, self._seed, self._shuffle, self._drop = data, config, seed, shuffle, drop
        self._name = type(data.dataset).__name__
        self._epochs = _Epochs(data, seed, trains=trains)
        number = _length(data.dataset)
        self._epoch_steps = epoch_steps or np.iinfo(np.int64).max
        self._threads = 1
        self._draws = False
        # Keras, too, determines the shapes from two batches
        heads = [self._item(0, at) for at in range(2 if number is None else min(number, 2))]
        if not heads:
            raise ConfigError(Problem(_KEY, f"got {self._name} without batches; its length is 0"))
        self._structure, self._head = heads[0]
        self._notes: list[str] = []
        self._threads = self._choose_threads(data.dataset, config, number)
        self._spec = [_spec([leaves[at] for _, leaves in heads], self._name) for at in range(len(self._head))]
        rows = {len(leaf) for leaf in self._head}
        if len(rows) > 1:
            message = f"the arrays of batch 0 of {self._name} differ in length: {[leaf.shape for leaf in self._head]}"
            raise ConfigError(Problem(_KEY, message))
        self.global_batch = rows.pop()
        if number is not None and limit is not None:
            number = min(number, math.ceil(limit / self.global_batch))
        self._number = number
        self.num_examples, self.num_batches = None, None if drop else number
        self.empty = self._empty()
        self.endless = self.is_numbered = number is None
        self.in_python = self.can_compare_rows = True
        self.reads_all, self.notes = self._name, tuple(self._notes)

    def _empty(self) -> Any:
        """Return a row source without rows."""
        return map_structure(lambda leaf: empty_value(leaf.tensor_spec()), self._batch_spec)

    def _choose_threads(self, dataset: keras.utils.PyDataset, config: DataConfig, number: int | None) -> int:
        """Return the number of threads that may read, and add notes about random draws and settings without effect.

        If `__getitem__` draws from global random generators, the numbers depend on the order of calls, so that only one
        thread may read.
        """
        wanted = config.threads or dataset.workers
        if dataset.use_multiprocessing:
            self._notes.append(f"{self._name}: use_multiprocessing has no effect, because batches are read in threads")
        if self._draws and wanted > 1:
            hint = "draw from np.random.default_rng([epoch, index]) to read in several threads"
            message = f"{self._name}: __getitem__ draws from the generators of `random` or NumPy, so only one thread"
            self._notes.append(f"{message} reads, instead of {wanted}; {hint}")
        again = self._item(0, 0)[1]
        if len(again) != len(self._head) or not all(map(_is_same, again, self._head)):
            message = (
                f"{self._name}: __getitem__ returns a different batch 0 each time, from its own generator, which a"
            )
            message += " resume cannot reset" + (" and which threads share" if wanted > 1 else "")
            self._notes.append(f"{message}; draw from np.random, or np.random.default_rng([epoch, index])")
        # several threads would read batches of two epochs at the same time if the dataset has no end
        return 1 if number is None or self._draws else wanted

    @not_converted
    def batches(self, number_of_pass: Index, start: Index) -> Any:
        # with `drop`, batches must be read to find the ones to drop
        first = tf.constant(0, tf.int64) if self._drop else start
        if self._number is None:
            numbers = tf.data.Dataset.range(first, np.iinfo(np.int64).max)
        else:
            numbers = tf.data.Dataset.from_tensor_slices(self._order(number_of_pass)[first:])

        def read(index: tf.Tensor) -> Any:
            at = number_of_pass if self._number is not None else index // self._epoch_steps
            read = tf.numpy_function(self._read, [at, index, first], [tf.as_dtype(leaf.dtype) for leaf in self._spec])
            leaves = [tf.ensure_shape(leaf, spec.shape) for leaf, spec in zip(read, self._spec, strict=True)]
            return tf.nest.pack_sequence_as(self._structure, leaves)

        threads = None if self._threads <= 1 else self._threads
        rows = numbers.map(read, num_parallel_calls=threads, deterministic=None if threads is None else True)
        if not self._drop:
            return rows
        return rows.filter(unpack_arguments(lambda batch: num_rows(batch) == self.global_batch)).skip(start)

    def _order(self, number_of_pass: Index) -> tf.Tensor:
        assert self._number is not None, "batches of a known number"
        order = tf.range(self._number, dtype=tf.int64)
        if not self._shuffle:
            return order
        seed = [tf.constant(self._seed, tf.int64), number_of_pass]
        return shuffle_numbers(order, seed=seed)

    def _read(self, number_of_pass: Any, index: Any, start: Any) -> list[np.ndarray]:
        at, number = int(number_of_pass), int(index)
        with reading(f"batch {number} of {self._name}"):
            _, leaves = self._item(at, number)
            if len(leaves) != len(self._spec):
                raise DataError(f"it has {len(leaves)} parts, but batch 0 has {len(self._spec)}")
            for leaf, spec in zip(leaves, self._spec, strict=True):
                if not spec.is_compatible_with(leaf.shape):
                    raise DataError(f"its shape is {leaf.shape}, but the shape of other batches is {spec.shape}")
            cast = [leaf.astype(object if spec.dtype == "string" else spec.dtype, copy=False)
                    for leaf, spec in zip(leaves, self._spec, strict=True)]  # fmt: skip
        self._epochs.batch_was_read(at, number, self._num_read_in_pass(at, int(start)))
        return cast

    def _num_read_in_pass(self, number_of_pass: int, start: int) -> int:
        """Return the number of batches of a pass that are read if the first one is batch `start`."""
        if self._number is not None:
            return self._number - start
        return self._epoch_steps - max(start - number_of_pass * self._epoch_steps, 0)

    def _item(self, number_of_pass: int, index: int) -> tuple[Any, list[np.ndarray]]:
        dataset = self._epochs.dataset_in_pass(number_of_pass)
        if self._threads > 1:  # then `__getitem__` draws no random numbers, see `_choose_threads`
            item = dataset[index]
        else:
            with _seeded_generators(self._seed, number_of_pass, _ITEM, index) as has_drawn:
                item = dataset[index]
                self._draws |= has_drawn()
        item = tuple(item) if isinstance(item, list) else item if isinstance(item, (tuple, dict)) else (item,)
        item = as_arrays(item)
        return item, [as_array(leaf) for leaf in flatten(item)]

    def read(self, rows: Any, *, at_once: int = 1) -> Batch:
        return rows

    def sample(self, number: int) -> tf.data.Dataset:
        leaves = [tf.constant(leaf[:number]) for leaf in self._head]
        return tf.data.Dataset.from_tensors(tf.nest.pack_sequence_as(self._structure, leaves))

    def fingerprint(self) -> str:
        return fingerprint([self._head], self._batch_spec, [0])

    @property
    def _batch_spec(self) -> Any:
        return pack(self._structure, self._spec)


class _Epochs:
    """Keeps a dataset in the state of one pass, by calling its hooks; safe for several threads.

    The changes that hooks make are unknown, so an earlier pass needs a new dataset from the data function.
    """

    def __init__(self, data: PyData, seed: int, *, trains: bool) -> None:
        self._data, self._seed, self._trains = data, seed, trains
        self._lock = threading.Lock()
        self._dataset = data.dataset
        self._ended, self._is_begun = 0, False
        self._read: set[int] = set()

    def dataset_in_pass(self, number_of_pass: int) -> Any:
        """Return the dataset in the state of a pass that has begun."""
        with self._lock:
            if not self._trains:
                number_of_pass = 0
            if number_of_pass < self._ended:
                self._dataset = self._data.reload()
                self._ended, self._is_begun = 0, False
            while self._ended < number_of_pass:
                self._begin()
                self._end()
            self._begin()
            return self._dataset

    def batch_was_read(self, number_of_pass: int, index: int, of: int) -> None:
        """Record that a batch of a pass has been read; the last one ends the pass.

        Args:
            of: number of batches that are read in this pass.
        """
        with self._lock:
            if not self._trains or number_of_pass != self._ended or not self._is_begun:
                return
            self._read.add(index)
            if len(self._read) == of:
                self._end()

    def _begin(self) -> None:
        if not self._is_begun:
            if self._ended == 0 and self._trains:
                # as `fit` does before its first epoch
                with _seeded_generators(self._seed, 0, _FIRST):
                    self._dataset.on_epoch_end()
            with _seeded_generators(self._seed, self._ended, _BEGIN):
                self._dataset.on_epoch_begin()
            self._is_begun = True
            self._read = set()

    def _end(self) -> None:
        with _seeded_generators(self._seed, self._ended, _END):
            self._dataset.on_epoch_end()
        self._ended += 1
        self._is_begun = False


@contextlib.contextmanager
def _seeded_generators(*numbers: int) -> Iterator[Callable[[], bool]]:
    """Seed the global generators of Python and NumPy in this context, and restore them afterwards.

    Yields:
        A function that returns whether a generator has been used since it was seeded.
    """
    before = random.getstate(), np.random.get_state()
    random.seed(" ".join(map(str, numbers)))
    np.random.seed(np.random.SeedSequence(numbers).generate_state(4))
    seeded = _states()
    try:
        yield lambda: _states() != seeded
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _states() -> tuple[Any, ...]:
    _, key, *others = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(key).tobytes(), *others


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()


def _length(dataset: keras.utils.PyDataset) -> int | None:
    try:
        return dataset.num_batches
    except NotImplementedError:
        message = f"got {type(dataset).__name__} with neither __len__ nor num_batches"
        raise ConfigError(Problem(_KEY, f"{message}; add `def __len__(self)`, the number of batches")) from None


def _spec(leaves: list[np.ndarray], name: str) -> ArraySpec:
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ConfigError(Problem(_KEY, f"batch 0 of {name} has a single value; expected arrays with rows"))
    sizes = [None, *(size.pop() if len(size := {leaf.shape[at] for leaf in leaves}) == 1 else None
                     for at in range(1, leaves[0].ndim))]  # fmt: skip
    return ArraySpec(tuple(sizes), ArraySpec.of(leaves[0]).dtype)


def check_config(config: DataConfig, dataset: keras.utils.PyDataset, rows: int | None, *, training: bool) -> None:
    """Raise ConfigError if a setting cannot be used with a `PyDataset`.

    Args:
        rows: rows of the dataset's first batch.
    """
    name = type(dataset).__name__
    problems = []
    for key in ("map", "augment") if training else ("map",):
        if getattr(config, key) is not None:
            message = f"got {getattr(config, key)}, but {name} gives batches, not single examples"
            problems.append(
                Problem(
                    ("data", key), f"{message}; call the function in the dataset's __getitem__, and remove this setting"
                )
            )
    if training and config.global_batch not in (None, rows):
        message = f"got {config.global_batch}, but the batches of {name} are global batches, and have {rows} examples"
        problems.append(Problem(("data", "global_batch"), f"{message}; remove it, or write {rows}"))
    if training and config.sharding != "rows":
        message = f"got '{config.sharding}', but each process reads all batches of {name}"
        problems.append(Problem(("data", "sharding"), f"{message}; remove it"))
    if training and config.on_error == "skip":
        message = f"got 'skip', but {name} gives batches, so no other example can replace one that fails"
        problems.append(Problem(("data", "on_error"), f"{message}; write 'stop'"))
    if training and config.processes is not None:
        message = f"got {config.processes}, but {name} gives batches, which are read in threads"
        problems.append(Problem(("data", "processes"), f"{message}; remove it, and set `workers` of the dataset"))
    if problems:
        raise ConfigError(problems)
