"""Split of a `keras.utils.PyDataset` that is read as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from distlaunch.data.on_host.ahead import map_ahead
from distlaunch.data.on_host.random import shuffled
from distlaunch.data.on_host.split import HostSplit
from distlaunch.data.sources.py_datasets import PyDatasets
from distlaunch.data.structures import flatten, map_structure, pack


class HostPyDatasets(HostSplit, PyDatasets):
    """Split of a `keras.utils.PyDataset`; the order and the batches are those of `PyDatasets`."""

    def _empty(self) -> Any:
        return map_structure(lambda leaf: leaf[:0], pack(self._structure, self._head))

    def batches(self, number_of_pass: int, start: int) -> Iterator[Any]:
        # with `drop`, batches must be read to find the ones to drop
        first = 0 if self._drop else int(start)
        numbers = count(first) if self._number is None else self._host_order(int(number_of_pass))[first:].tolist()

        def read(index: int) -> Any:
            at = int(number_of_pass) if self._number is not None else index // self._epoch_steps
            return pack(self._structure, self._read(at, index, first))

        threads = max(self._threads, 1)
        read_batches = map_ahead(read, numbers, threads, lambda _: threads)
        if not self._drop:
            yield from read_batches
            return
        full = (batch for batch in read_batches if len(flatten(batch)[0]) == self.global_batch)
        for index, batch in enumerate(full):
            if index >= start:
                yield batch

    def _host_order(self, number_of_pass: int) -> np.ndarray:
        assert self._number is not None, "batches of a known number"
        order = np.arange(self._number, dtype=np.int64)
        return shuffled(order, (self._seed, number_of_pass)) if self._shuffle else order

    def batch_spec(self) -> Any:
        return self._batch_spec

    def sample(self, number: int) -> Any:
        return pack(self._structure, [leaf[:number] for leaf in self._head])

    def _identifying_arrays(self, rows: Any) -> list[np.ndarray]:
        leaves = flatten(rows)
        first, last = ([leaf[at : at + 1] for leaf in leaves] for at in (0, len(leaves[0]) - 1))
        return [*first, *last, np.int64(len(leaves[0]))]  # pyright: ignore[reportReturnType]
