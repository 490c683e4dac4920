"""Event files: appended to by many, followed by readers, one JSON line an event."""

from __future__ import annotations

import dataclasses
import heapq
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from distlaunch.base.events import Event, Notice, StepsDone
from distlaunch.base.folders import make_folder
from distlaunch.base.protocol import EVENT_FORMAT
from distlaunch.base.regular_files import NotRegularError, open_regular
from distlaunch.base.secret_mask import SecretMask

if TYPE_CHECKING:
    from distlaunch.base.run_dir import RunDir

E = TypeVar("E", bound=Event)
_MOST_WAITING = 10_000
"""Largest number of waiting step events; all others wait in any number."""
_TAIL_BYTES = 32 * 1024
READ_BYTES = 1 << 20
LONGEST_LINE = 16 << 20
"""Bytes of an event; of a longer one, only its kind is written."""


class EventWriter:
    """Appends events to one file, as `LineWriter` does."""

    def __init__(self, path: Path, *, attempt: int, task: str) -> None:
        self.path, self._attempt, self._task = path, attempt, task
        self._lines = LineWriter(path)
        self._mask = SecretMask(os.environ)

    def write(self, event: Event) -> Event:
        """Stamp an event with time, attempt and task, mask secrets, and append it."""
        stamped = dataclasses.replace(
            event, time=time.time(), attempt=self._attempt, task=self._task, format_version=EVENT_FORMAT
        )
        if len(line := stamped.to_json(self._mask)) > LONGEST_LINE:
            text = f"an event of the kind {type(event).__name__} is not recorded: it has {len(line):,} characters"
            return self.write(Notice(level="warning", message=text))
        self._lines.write(line, most_waiting=_MOST_WAITING if isinstance(event, StepsDone) else None)
        return stamped

    @property
    def behind(self) -> bool:
        """Return True if events wait for room on the disk."""
        return self._lines.behind

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        self._lines.close()


def append_events(path: Path, *events: Event, attempt: int, task: str) -> list[Event]:
    """Append events to a file, and return them as they were written; none if the disk is full."""
    try:
        writer = EventWriter(path, attempt=attempt, task=task)
    except OSError:
        return []
    written = [writer.write(event) for event in events]
    writer.close()
    return written


class EventReader:
    """Follows an event file: each `read` returns what was appended since the last. Waits for no one."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> Iterator[Event]:
        """Return the new events. Incomplete lines are left for later; lines that are no events are skipped."""
        try:
            if os.stat(self._path).st_size <= self._offset:  # of a thousand files few have anything new
                return
            with open_regular(self._path) as file:
                file.seek(self._offset)
                for line, length in _lines(file):
                    self._offset += length
                    yield from parse_events(line)
        except (FileNotFoundError, NotRegularError):
            return


def parse_events(data: bytes) -> Iterator[Event]:
    """Return the events in complete lines; lines that are no events are skipped."""
    # a line cut at the front, as `read_tail` has it, is no JSON
    for line in data.splitlines():
        try:
            yield Event.from_json(line.decode())
        except ValueError:
            continue


def read_events(path: Path) -> list[Event]:
    """Return all events of a file, oldest first."""
    return list(EventReader(path).read())


def read_all_events(run: RunDir) -> list[Event]:
    """Return all events of a run by time, including those of evaluations, predictions and exports."""
    return _in_order([read_events(path) for path in run.event_files()])


def read_all_events_of(run: RunDir, *kinds: type[Event]) -> list[Event]:
    """Return the events of some kinds of a run; files and order are those of `read_all_events`."""
    return _in_order([read_events_of(path, *kinds) for path in run.event_files()])


def _in_order(files: Sequence[list[Event]]) -> list[Event]:
    # what one file holds stays in its order: a clock may have been set back
    return list(heapq.merge(*files, key=lambda event: event.time))


def read_events_of(path: Path, *kinds: type[E]) -> list[E]:
    """Return the events of some kinds, oldest first, without parsing the other lines, which may be many."""
    marks = [f'"event":"{kind.__name__}"'.encode() for kind in kinds]
    try:
        with open_regular(path) as file:
            lines = [line for line, _ in _lines(file, partial=True) if any(mark in line for mark in marks)]
    except (FileNotFoundError, NotRegularError):
        return []
    return [event for event in parse_events(b"\n".join(lines)) if isinstance(event, kinds)]


def _lines(file: IO[bytes], *, partial: bool = False) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file from where it is, each with its length in the file, without reading all of it at once.

    One that is longer than an event can be is empty.

    Args:
        partial: also the rest, which may be a line that is just being written.
    """
    rest, length, is_long = b"", 0, False
    while data := file.read(READ_BYTES):
        first, *lines = data.split(b"\n")
        rest, length = b"" if is_long else rest + first, length + len(first)
        for line in lines:
            yield b"" if is_long else rest, length + 1
            rest, length, is_long = line, len(line), False
        if len(rest) > LONGEST_LINE:
            rest, is_long = b"", True
    if partial and rest:
        yield rest, length


def read_tail(path: Path) -> list[Event]:
    """Return the newest events of a file, oldest first: at least the last ten seconds or so of a task."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return list(parse_events(file.read()))
    except OSError:
        return []


class LineWriter:
    """Appends lines to one file, each with a single `write`, so that readers never see half of an earlier line.

    Threads may share it. A disk that is full stops nobody: lines wait in memory, and are written with the first that
    can be.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        # appending: each write goes to the end, whatever other processes have written
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        # another may have left half a line, on a disk that was full
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, line: str, *, most_waiting: int | None = None) -> None:
        """Append a line.

        Args:
            most_waiting: number of waiting lines from which on it is dropped; None: never.
        """
        with self._lock:
            if most_waiting is None or len(self._waiting) < most_waiting:
                self._waiting.append((line + "\n").encode())
            self._flush()

    @property
    def behind(self) -> bool:
        """Return True if lines wait for room on the disk."""
        return bool(self._waiting)

    def _flush(self) -> None:
        while self._waiting:
            line = (b"\n" if self._torn else b"") + self._waiting[0]
            try:
                written = os.write(self._fd, line)
            except OSError:
                # the disk is full: what waits is tried with the next line
                return
            # the rest of a line does not follow: others may have written meanwhile
            self._torn = written < len(line)
            if written < len(line):
                return
            # only what is in the file whole is forgotten
            del self._waiting[0]

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        os.close(self._fd)
