"""Computes results ahead of their use, in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Any], Result], items: Iterable[Any], threads: int, ahead: Callable[[Result], int]
) -> Iterator[Result]:
    """Yield the results of a function for each item, in order, while threads compute the next ones.

    Args:
        function: called in the threads.
        items: read in the calling thread, as far ahead as results are computed.
        threads: number of threads.
        ahead: returns how many results to compute ahead of their use, given one of them.
    """
    rest = iter(items)
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, "distlaunch-data") as pool:

        def start(number: int) -> None:
            while len(waiting) < number and (item := next(rest, pool)) is not pool:
                waiting.append(pool.submit(function, item))

        try:
            start(1)
            while waiting:
                result = waiting.popleft().result()
                start(max(ahead(result), 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()
