"""Loads the rows of each global batch that a process needs for its devices, as NumPy arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distlaunch.data.batches import Batch, Source, num_rows, slice_rows
from distlaunch.data.on_host.ahead import map_ahead
from distlaunch.data.read_ahead import MOST_BATCHES, MOST_BYTES
from distlaunch.data.structures import flatten

Loaded = tuple[Batch | None, int, int]
"""Batch, index of its first row in the global batch, and number of rows of the global batch."""
QUICK_S = 0.0005
"""A batch that takes no longer than these seconds is as good as in memory."""
_MOST_SLOW = 3


def rows_of_process(source: Source, *, first: int, number: int, of: int) -> Iterator[Loaded]:
    """Yield the rows of each global batch that a process needs, like `data.rows.rows_of_process`.

    The batch is None at the end of an epoch, unless the source is process-local.
    """
    calls = source.at_once or 1

    def load(numbered: tuple[int, Any]) -> Loaded:
        index, element = numbered
        if source.is_process_local:
            rows, total, start = element[0], int(element[1]), 0
        else:
            rows, total = element, int(num_rows(element))
            if not total:
                return None, 0, 0
            start, stop = (total // of * first, total // of * (first + number)) if total % of == 0 else (0, total)
            rows = rows if number == of else slice_rows(rows, start, stop)
        batch = source.load(rows, at_once=calls)
        if source.record is not None:
            rows_here = np.int64(total) if source.is_process_local else num_rows(batch)
            source.record(index, batch, np.int64(start), rows_here, np.int64(total))
        return batch, start, total

    def ahead(loaded: Loaded) -> int:
        num_bytes = sum(leaf.nbytes for leaf in flatten(loaded[0])) if loaded[0] is not None else 0
        return min(max(calls, MOST_BATCHES), MOST_BYTES // max(num_bytes, 1))

    elements = enumerate(source.elements)
    if not source.threads:
        yield from _while_quick(load, elements)
    yield from map_ahead(load, elements, calls, ahead)


def _while_quick(load: Callable[[tuple[int, Any]], Loaded], elements: Iterator[tuple[int, Any]]) -> Iterator[Loaded]:
    """Load batches in this thread, until it has taken long several times in a row.

    Handing a batch from one thread to another takes about as long as gathering its rows from arrays in memory.
    """
    slow = 0
    for element in elements:
        began = time.perf_counter()
        loaded = load(element)
        slow = slow + 1 if time.perf_counter() - began > QUICK_S else 0
        yield loaded
        if slow == _MOST_SLOW:
            return
