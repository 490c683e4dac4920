"""Event files: appended to by many, followed by readers, one JSON line an event."""

from __future__ import annotations

import dataclasses
import heapq
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from distlaunch.base.events import Event, StepsDone
from distlaunch.base.line_files import LineWriter
from distlaunch.base.protocol import EVENT_FORMAT
from distlaunch.base.regular_files import NotRegularError, open_regular
from distlaunch.base.run_dir import RunDir
from distlaunch.base.secret_values import SecretMask

_MOST_WAITING = 10_000
"""Of steps; epochs, checkpoints and ends wait in any number."""
_TAIL_BYTES = 32 * 1024


class EventWriter:
    """Appends events to one file, as `LineWriter` does."""

    def __init__(self, path: Path, *, attempt: int, task: str) -> None:
        self.path, self._attempt, self._task = path, attempt, task
        self._lines = LineWriter(path)
        self._mask = SecretMask(os.environ)

    def write(self, event: Event) -> Event:
        """Stamps the event with time, attempt and task, and appends it without secrets."""
        stamped = dataclasses.replace(
            event, time=time.time(), attempt=self._attempt, task=self._task, format_version=EVENT_FORMAT
        )
        self._lines.write(
            stamped.to_json(self._mask), most_waiting=_MOST_WAITING if isinstance(event, StepsDone) else None
        )
        return stamped

    @property
    def behind(self) -> bool:
        """Whether events wait for room."""
        return self._lines.behind

    def close(self) -> None:
        """What could not be written by now is lost."""
        self._lines.close()


class EventReader:
    """Follows an event file: each `read` returns what was appended since the last. Waits for no one."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> Iterator[Event]:
        """Complete lines only; a line that is not an event (a torn write) is passed over."""
        try:
            if os.stat(self._path).st_size <= self._offset:  # of a thousand files few have anything new
                return
            with open_regular(self._path) as file:
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, NotRegularError):
            return
        # the rest is a line that is just being written
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        yield from parse_events(data[:complete])


def parse_events(data: bytes) -> Iterator[Event]:
    """The events in whole lines; what is torn or no event is passed over."""
    # a line cut at the front, as `read_tail` has it, is no JSON
    for line in data.splitlines():
        try:
            yield Event.from_json(line.decode())
        except ValueError:
            continue


def read_events(path: Path) -> list[Event]:
    """All events of a file, oldest first."""
    return list(EventReader(path).read())


def read_all_events(run: RunDir) -> list[Event]:
    """All events of a run in the order of time, with those of attempts that only use what it has trained."""
    return _in_order([read_events(path) for path in run.event_files()])


def read_all_events_of(run: RunDir, *kinds: type[Event]) -> list[Event]:
    """Events of some kinds of a run, from the same files and in the same order as `read_all_events`."""
    return _in_order([read_events_of(path, *kinds) for path in run.event_files()])


def _in_order(files: Sequence[list[Event]]) -> list[Event]:
    # what one file holds stays in its order: a clock may have been set back
    return list(heapq.merge(*files, key=lambda event: event.time))


def read_events_of(path: Path, *kinds: type[Event]) -> list[Event]:
    """Events of some kinds, oldest first; other lines, which may be a great many, are not parsed."""
    marks = [f'"event":"{kind.__name__}"'.encode() for kind in kinds]
    try:
        with open_regular(path) as file:
            data = file.read()
    except (FileNotFoundError, NotRegularError):
        return []
    return list(parse_events(b"\n".join(line for line in data.splitlines() if any(mark in line for mark in marks))))


def read_tail(path: Path) -> list[Event]:
    """The newest events of a file, oldest first; of a task, those of some ten seconds at least."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return list(parse_events(file.read()))
    except OSError:
        return []
