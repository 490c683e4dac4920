"""A file written and read in pieces, several at a time, each with a checksum of its own.

Threads copy between the file and the buffers that hold its bytes, with nothing in between, and with no more memory than
those take. Whoever wants a part of a file reads, and verifies, only the pieces that it lies in.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from distlaunch.cluster.cores import num_visible_cores
from distlaunch.strategies.state.pace import Pace

PIECE_BYTES = 4 << 20
"""Large enough that a thread seldom takes the interpreter's lock: one of low priority may have to wait for a core while
it has that, and training waits with it."""
_COPIED_BYTES = 256 << 10  # at a time: it stays in a core's cache until it is written
_MOST_BUFFERS = 512  # to a system call
_MOST_THREADS = 8


class Buffers:
    """Buffers as one row of bytes: those of a file."""

    def __init__(self, buffers: Iterable[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._starts = list(itertools.accumulate(map(len, self._buffers), initial=0))
        self.num_bytes = self._starts[-1]

    def turns(self, number: int) -> Iterator[tuple[int, list[memoryview]]]:
        """The buffers of a piece, as many at a time as a system call takes, and where they are in the file."""
        at = number * PIECE_BYTES
        views = list(self._between(at, min(at + PIECE_BYTES, self.num_bytes)))
        for first in range(0, len(views), _MOST_BUFFERS):
            some = views[first : first + _MOST_BUFFERS]
            yield at, some
            at += sum(map(len, some))

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[index]
            view = self._buffers[index][start - first : stop - first]
            yield view
            start += len(view)
            index += 1


def write_pieces(fd: int, buffers: Buffers, pace: Pace) -> list[bytes]:
    """Writes a new file; returns the SHA-256 of each piece. Raises OSError: a full disk."""

    def write(number: int) -> bytes:
        digest = hashlib.sha256()
        with pace.piece():
            for at, views in buffers.turns(number):
                for view in views:
                    digest.update(view)
                _whole(os.pwritev, fd, views, at)
        return digest.digest()

    # steps go on meanwhile, and need the memory as much as the cores
    return _in_threads(write, pieces_of(0, buffers.num_bytes), max(num_visible_cores() // 2, 1))


def read_pieces(fd: int, buffers: Buffers, wanted: Collection[int] | None = None) -> dict[int, bytes]:
    """Reads a file into buffers.

    Args:
        wanted: numbers of the pieces; None: all.

    Returns:
        The SHA-256 of each piece that is wanted.

    Raises:
        OSError: the disk does not give it out.
        EOFError: the file is shorter.
    """

    def read(number: int) -> bytes:
        digest = hashlib.sha256()
        for at, views in buffers.turns(number):
            _whole(os.preadv, fd, views, at)
            for view in views:
                digest.update(view)
        return digest.digest()

    numbers = pieces_of(0, buffers.num_bytes) if wanted is None else sorted(wanted)
    return dict(zip(numbers, _in_threads(read, numbers, num_visible_cores()), strict=True))


def pass_pieces(fd: int, num_bytes: int, target: int | None) -> list[bytes]:
    """Reads a file through small buffers; returns the SHA-256 of each piece.

    For memory that has a descriptor this is faster than to read into a mapping, whose every page is then made by a
    fault, and filled twice.

    Args:
        target: the descriptor that gets a copy; None: none is wanted.

    Raises:
        OSError: the disk does not give it out, or there is no room.
        EOFError: the file is shorter.
    """

    def take(number: int) -> bytes:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_COPIED_BYTES))
        stop = min((number + 1) * PIECE_BYTES, num_bytes)
        for at in range(number * PIECE_BYTES, stop, _COPIED_BYTES):
            view = buffer[: stop - at]
            _whole(os.preadv, fd, [view], at)
            digest.update(view)
            if target is not None:
                _whole(os.pwritev, target, [view], at)
        return digest.digest()

    return _in_threads(take, pieces_of(0, num_bytes), num_visible_cores())


def pieces_of(start: int, stop: int) -> range:
    """Numbers of the pieces that some bytes lie in."""
    return range(start // PIECE_BYTES, -(-stop // PIECE_BYTES))


def _whole(call: Callable[[int, list[memoryview], int], int], fd: int, views: list[memoryview], offset: int) -> None:
    """Repeats a system call, which may do a part, until all is done."""
    while views:
        done = call(fd, views, offset)
        if not done:
            raise EOFError
        offset += done
        while views and done >= len(views[0]):
            done -= len(views[0])
            views = views[1:]
        if done:
            views = [views[0][done:], *views[1:]]


def _in_threads(action: Callable[[int], bytes], numbers: Sequence[int], most: int) -> list[bytes]:
    threads = min(most, len(numbers), _MOST_THREADS)
    if threads < 2:
        return [action(number) for number in numbers]
    pool = ThreadPoolExecutor(threads, "pieces")  # as patient as the thread that starts them
    try:
        return list(pool.map(action, numbers))
    finally:
        pool.shutdown(cancel_futures=True)
