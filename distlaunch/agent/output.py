"""Copies the output of tasks to log files, with secrets masked, and complete lines to the screen, in a single loop."""

from __future__ import annotations

import itertools
import os
import selectors
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from distlaunch.agent.log_noise import is_noise
from distlaunch.base.folders import make_folder
from distlaunch.base.secret_mask import SecretMask

READ_BYTES = 64 * 1024  # the size of a pipe's buffer in Linux
MAX_LINE_BYTES = 4000  # longer lines are shortened on the screen, but not in logs
DRAIN_BYTES = 4 * 1024 * 1024  # read at most this much after a task has ended: a stray process may write forever
LINES_PER_S = 100.0  # lines of a task on the screen after the first `LINES_AT_ONCE`
LINES_AT_ONCE = 400.0
LAST_LINES = 3
"""Number of hidden lines that are shown when no more output comes, since the last lines are often the result."""
PAUSE_S = 0.5
"""Seconds without output after which the last hidden lines are shown."""
_SEARCHED_LINES = 10
"""Number of lines at the end of skipped output that are searched for lines worth showing."""

LineSink = Callable[[str, str], None]
"""Called with a task and a line of its output."""


class LineSplitter:
    """Splits bytes into complete lines, decoded and shortened. It keeps only the last state of a progress bar."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tail = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, tail = (self._tail + data).split(b"\n")
        self._tail = self._shorten(tail)
        return [self._text(line) for line in lines]

    def skip(self, data: bytes) -> tuple[int, list[str]]:
        """Skip data without splitting it into lines; return the number of lines that ended, and the last few."""
        number, end = data.count(b"\n"), data.rfind(b"\n")
        if not number:
            # limit the memory of a line without an end
            self._tail = self._shorten(self._tail + data)
            return 0, []
        # the tail begins the first line, and is needed only if the first line is also one of the last lines
        whole = (self._tail if number <= _SEARCHED_LINES else b"") + data[:end]
        self._tail = self._shorten(data[end + 1 :])
        return number, [self._text(line) for line in whole.rsplit(b"\n", _SEARCHED_LINES)[-_SEARCHED_LINES:]]

    def flush(self) -> list[str]:
        """Return the last line, if it has no line break."""
        tail, self._tail = self._tail, b""
        text = self._text(tail)
        return [text] if text.strip() else []

    def _shorten(self, tail: bytes) -> bytes:
        if len(tail) <= self._max_bytes:
            return tail
        # a progress bar shows only the text after the last \r
        body, _, last = tail.rpartition(b"\r")
        if not last:  # a \n may still follow the final \r and complete the line before it
            last = body.rpartition(b"\r")[2] + b"\r"
        # keep one extra byte, by which `_text` detects that the line was cut
        return last[: self._max_bytes + 1]

    def _text(self, line: bytes) -> str:
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        cut = len(line) > self._max_bytes
        return line[: self._max_bytes].decode(errors="replace") + (" ..." if cut else "")


class Allowance:
    """The limit on lines of a task on the screen: a burst, and a rate per second."""

    def __init__(self, now: float, *, per_s: float = LINES_PER_S, at_once: float = LINES_AT_ONCE) -> None:
        self._per_s, self._at_once = per_s, at_once
        self._left, self._then = at_once, now

    def take(self, now: float) -> bool:
        self._left = min(self._at_once, self._left + (now - self._then) * self._per_s)
        self._then = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Stream:
    """A pipe of a task.

    Attributes:
        number: position of the stream in the order in which streams were added.
        hidden: the last of the lines that were not shown on the screen.
        num_lost: number of bytes that could not be written to the log since the last successful write.
    """

    def __init__(self, number: int, task: str, pipe: IO[bytes], log_path: Path, log_fd: int, allowance: Allowance,
                 mask: SecretMask) -> None:  # fmt: skip
        self.number, self.task, self.pipe, self.log_path, self.log_fd = number, task, pipe, log_path, log_fd
        self.allowance, self.mask, self.splitter = allowance, mask, LineSplitter()
        self.num_hidden, self.hidden_at, self.num_lost = 0, 0.0, 0
        self.hidden: deque[str] = deque(maxlen=LAST_LINES)


class Pump:
    """Reads the pipes of all tasks fairly: in each turn, it reads a bounded part of each pipe that has data.

    Args:
        show: called with lines for the screen.
        clock: returns monotonic seconds.
    """

    def __init__(self, show: LineSink, clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count()
        self._hiding: dict[int, _Stream] = {}  # streams with hidden lines

    def add(self, task: str, pipe: IO[bytes], log_path: Path, mask: SecretMask) -> None:
        """Start to read a pipe of a task."""
        make_folder(log_path.parent)
        # a restarted task appends to the same file
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.set_blocking(pipe.fileno(), False)  # `finish` reads until the pipe is empty
        number, allowance = next(self._numbers), Allowance(self._clock())
        self._streams[pipe.fileno()] = _Stream(number, task, pipe, log_path, log_fd, allowance, mask)
        self._selector.register(pipe, selectors.EVENT_READ)

    def watch(self, fd: int, *, writing: bool = False) -> None:
        """Make `turn` also return when the caller can read from this descriptor, or write to it."""
        self._selector.register(fd, selectors.EVENT_WRITE if writing else selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def turn(self, timeout_s: float) -> set[int]:
        """Wait for output and read a bounded part of it; return the watched descriptors that are ready."""
        ready = {key.fd for key, _ in self._selector.select(timeout_s)}
        # standard output first: a traceback on standard error makes the observer hold back, or drop, later lines
        for stream in sorted((self._streams[fd] for fd in ready & self._streams.keys()), key=lambda each: each.number):
            self._read(stream)
        if self._hiding:
            paused_since = self._clock() - PAUSE_S
            for stream in [each for each in self._hiding.values() if each.hidden_at <= paused_since]:
                self._forward_last(stream)
        return ready - self._streams.keys()

    def finish(self, task: str) -> None:
        """Read the last output of an ended task, up to a limit, and close its pipes.

        A stray process may still have the pipes open, and may write forever.
        """
        for stream in [stream for stream in self._streams.values() if stream.task == task]:
            left = DRAIN_BYTES
            # `_read` closes the stream at the end of file
            while stream.pipe.fileno() in self._streams and (taken := self._read(stream)) and left > 0:
                left -= taken
            self._close(stream)

    def close(self) -> None:
        for stream in list(self._streams.values()):
            self._close(stream)
        self._selector.close()

    def _read(self, stream: _Stream) -> int:
        try:
            # read once, not until the pipe is empty, so that other tasks are read as well
            data = os.read(stream.pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return 0
        # all writers have closed their end
        if not data:
            self._close(stream)
            return 0
        if shown := stream.mask.feed(data):
            self._write_log(stream, shown)
            self._forward(stream, shown)
        return len(data)

    def _write_log(self, stream: _Stream, data: bytes) -> None:
        """Write to the log. On a full disk the lines are lost, and the log continues when there is room again."""
        view = memoryview(data)
        try:
            if stream.num_lost:
                os.write(stream.log_fd, f"\n[distlaunch: {stream.num_lost:,} bytes could not be written]\n".encode())
                stream.num_lost = 0
            while view:
                # a write may be incomplete, for example on a nearly full disk
                view = view[os.write(stream.log_fd, view) :]
        except OSError as error:
            if not stream.num_lost:
                self._show(stream.task, f"{stream.log_path} cannot be written: {error.strerror}")
            stream.num_lost += len(view)

    def _forward(self, stream: _Stream, data: bytes) -> None:
        now = self._clock()
        if stream.num_hidden and not stream.allowance.take(now):
            self._hide(stream, now, *stream.splitter.skip(data))
            return
        self._note_hidden(stream, stream.num_hidden)
        for line in stream.splitter.feed(data):
            if stream.num_hidden:
                self._hide(stream, now, 1, [line])
            elif not _is_for_screen(line):
                continue
            elif stream.allowance.take(now):
                self._show(stream.task, line)
            else:
                self._hide(stream, now, 1, [line])

    def _hide(self, stream: _Stream, now: float, number: int, last: Iterable[str]) -> None:
        """Count hidden lines, and keep the last ones.

        Args:
            number: how many lines are hidden.
            last: the last of the lines.
        """
        self._hiding[stream.pipe.fileno()] = stream
        stream.num_hidden += number
        stream.hidden_at = now
        stream.hidden.extend(line for line in last if _is_for_screen(line))

    def _forward_last(self, stream: _Stream) -> None:
        """Show the last hidden lines after a pause in the output."""
        last = list(stream.hidden)
        self._note_hidden(stream, stream.num_hidden - len(last))
        for line in last:
            self._show(stream.task, line)

    def _note_hidden(self, stream: _Stream, number: int) -> None:
        """Print how many lines were not shown, and show lines again from here on."""
        if number:
            self._show(stream.task, f"... {number:,} lines are only in {stream.log_path}")
        if stream.num_hidden:
            del self._hiding[stream.pipe.fileno()]
            stream.num_hidden = 0
            stream.hidden.clear()

    def _close(self, stream: _Stream) -> None:
        fd = stream.pipe.fileno() if not stream.pipe.closed else -1
        if self._streams.pop(fd, None) is None:
            return
        if left := stream.mask.flush():
            self._write_log(stream, left)
            self._forward(stream, left)
        self._forward_last(stream)
        for line in stream.splitter.flush():
            if not is_noise(line):
                self._show(stream.task, line)
        # unregister it before closing: the selector needs the descriptor
        self._selector.unregister(stream.pipe)
        stream.pipe.close()
        os.close(stream.log_fd)


def _is_for_screen(line: str) -> bool:
    return bool(line.strip()) and not is_noise(line)
