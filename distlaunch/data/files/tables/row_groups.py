"""Cache, shared by threads, of the latest row groups of Parquet files, up to a number of bytes."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_MOST_BYTES = 256 << 20  # documented in `parquet`


class RowGroupCache:
    """Cache of the latest results of `load`, objects with `nbytes`; the last one is kept even above the limit."""

    def __init__(self, load: Callable[[int], Any], most_bytes: int = _MOST_BYTES) -> None:
        self._load, self._most_bytes = load, most_bytes
        self.clear()
        _caches.add(self)

    def clear(self) -> None:
        """Remove all groups. Call this only while no other thread uses the cache."""
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, Future[Any]] = OrderedDict()
        self._num_bytes = 0

    def get(self, group: int) -> Any:
        """Return a row group, loaded if necessary. Errors of `load` are raised."""
        with self._lock:
            future = self._groups.get(group)
            loads = future is None
            if future is None:
                # other threads that want the same group wait for it instead of reading it again
                future = self._groups[group] = Future()
            self._groups.move_to_end(group)
        if loads:
            self._fill(group, future)
        return future.result()

    def _fill(self, group: int, future: Future[Any]) -> None:
        try:
            loaded = self._load(group)
        except BaseException as error:
            with self._lock:
                # an error is not cached, because the file may be readable the next time
                del self._groups[group]
            future.set_exception(error)
            return
        # first, so that waiting threads can continue
        future.set_result(loaded)
        with self._lock:
            self._num_bytes += loaded.nbytes
            for other, held in list(self._groups.items()):
                if self._num_bytes <= self._most_bytes:
                    break
                if other != group and held.done():
                    del self._groups[other]
                    self._num_bytes -= held.result().nbytes


_caches: weakref.WeakSet[RowGroupCache] = weakref.WeakSet()


def _clear_all() -> None:
    for cache in list(_caches):
        cache.clear()


# In a forked process, threads that held the lock or were loading do not exist, so the caches start empty. At this time
# the forked process has only one thread.
os.register_at_fork(after_in_child=_clear_all)
