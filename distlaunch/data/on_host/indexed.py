"""Split of examples by number that is read as NumPy arrays: arrays, Python objects, and files that Python decodes."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch
from distlaunch.data.examples.each_example import num_parallel_batches, num_threads
from distlaunch.data.examples.example_times import add_times
from distlaunch.data.examples.random_access import Arrays, FileExamples, Items
from distlaunch.data.examples.skipping import Skipping
from distlaunch.data.on_host.random import shuffled
from distlaunch.data.on_host.split import HostSplit
from distlaunch.data.structures import map_structure

_LARGE = 100_000
"""Number of examples above which an order is drawn ahead; this takes about 0.1 s for a million examples."""


class HostIndexed(HostSplit):
    """A split of examples by number; the order and the batches are those of `Indexed`.

    Args:
        seed, drop, skips: see `Indexed`.
    """

    def __init__(self, examples: Arrays | Items | FileExamples, config: DataConfig, seed: int | None, *, drop: bool,
                 skips: bool = False) -> None:  # fmt: skip
        self._examples, self._config, self._seed = examples, config, seed
        self._size, self._number = config.batch, examples.number
        self._used = self._number - self._number % self._size if drop else self._number
        if self._number < (self._size if drop else 1):
            raise ConfigError(Problem(("data",), f"{self._number} examples are too few for a batch of {self._size}"))
        self._skipping = Skipping(self._number, examples.name, config.skip_limit) if skips else None
        self._order = functools.lru_cache(maxsize=2)(self._make_order)
        self.num_examples, self.num_batches = self._number, math.ceil(self._used / self._size)
        self.empty = np.zeros([0], np.int64)
        self.global_batch, self.by_number, self.in_python = self._size, True, examples.in_python
        self.labels = examples.labels
        self.at_once = None if examples.whole else num_parallel_batches(config)
        self.threads = 0 if examples.whole else num_threads(config)
        self.work = "" if examples.whole else "reading"

    def _make_order(self, number_of_pass: int) -> np.ndarray:
        order = np.arange(self._number, dtype=np.int64)
        if self._seed is not None:
            order = shuffled(order, (self._seed, number_of_pass))
        return order + number_of_pass * self._number

    def batches(self, number_of_pass: int, start: int) -> Iterator[np.ndarray]:
        for index in range(int(start), self.num_batches or 0):
            yield self.pick(int(number_of_pass), index)
            if index == start and self._seed is not None and self._number > _LARGE:
                # otherwise the steps would wait for the next order at the end of the pass
                threading.Thread(target=self._order, args=(int(number_of_pass) + 1,), daemon=True).start()

    def pick(self, number_of_pass: int, index: int) -> np.ndarray:
        return self._order(number_of_pass)[index * self._size : min((index + 1) * self._size, self._used)]

    def sample(self, number: int) -> np.ndarray:
        return np.arange(min(number, self._number), dtype=np.int64)

    def fingerprint(self) -> str:
        return self._examples.describe()

    def read(self, rows: np.ndarray, *, at_once: int = 1) -> Batch:
        if isinstance(self._examples, Arrays):
            return self._examples.load(rows % self._number)
        began = time.perf_counter()
        if isinstance(self._examples, FileExamples):
            batch, seconds = self._read_files(self._examples, rows)
        else:
            batch, seconds = self._read_items(self._examples, rows)
        add_times(seconds, (time.perf_counter() - began) / at_once)
        return batch

    def _read_files(self, files: FileExamples, rows: np.ndarray) -> tuple[Batch, list[float]]:
        began = time.perf_counter()
        if self._skipping is None:
            batch = files.load(rows % self._number)
        else:
            parts = [self._skipping.read(int(row), lambda index, _: files.load(np.array([index]))) for row in rows]
            batch = map_structure(lambda *leaves: np.concatenate(leaves), *parts)
        # the examples of a batch are read together
        return batch, [(time.perf_counter() - began) / max(len(rows), 1)] * len(rows)

    def _read_items(self, items: Items, rows: np.ndarray) -> tuple[Batch, list[float]]:
        def timed(row: int) -> tuple[list[np.ndarray], float]:
            began = time.perf_counter()
            if self._skipping is None:
                index = row % self._number
                example = items.load_one(index, row // self._number)
            else:
                example = self._skipping.read(row, items.load_one)
            return example, time.perf_counter() - began

        numbers = rows.tolist()
        found = list(map(timed, numbers) if self.threads == 1 else self._pool.map(timed, numbers))
        return items.batch_of([example for example, _ in found]), [seconds for _, seconds in found]

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, "distlaunch-read")
