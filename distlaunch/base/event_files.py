"""Event files: several processes append to them and read them; each event is a JSON line."""

from __future__ import annotations

import dataclasses
import heapq
import os
import re
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
_MAX_WAITING_STEPS = 10_000
"""Maximum number of step events that wait for disk space. Other events are never dropped."""
_TAIL_BYTES = 32 * 1024
READ_BYTES = 1 << 20
MAX_EVENT_BYTES = 16 << 20
"""Maximum size of an event. If an event is larger, only its kind is recorded."""

_NUMBER = rb"(-?\d{1,18}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)"
_STEPS_DONE = re.compile(
    rb'\{"event":"StepsDone","time":%b,"attempt":(\d{1,9}),"task":"([a-z]{1,20}:\d{1,9})","format_version":\d{1,3},'
    rb'"epoch":(\d{1,15}),"step":(\d{1,15}),"step_in_epoch":(\d{1,15}),"steps":(\d{1,15}),"seconds":%b,"logs":\{.*\}\}\Z'
    % (_NUMBER, _NUMBER)
)
"""A line of a StepsDone event as `Event.to_json` writes it."""
_BEGINNINGS = (b'{"event":"AttemptStarted"', b'{"event":"TaskStarted"')
_OF_OUTLINE = ("TrainingStarted", "NumbersChecked", "EpochEnded", "RunEnded")
_OUTLINE = (*_BEGINNINGS, *(b'{"event":"%b"' % name.encode() for name in _OF_OUTLINE))
_STEPS_TIMED = b'{"event":"StepsTimed"'
_REPORTS: tuple[bytes, ...] = (b'{"event":"StepsDone"', _STEPS_TIMED)
MAX_REPORTS = 10_000
"""Number of StepsDone events, and of StepsTimed events, above which `read_event_sample` returns a sample."""
_VARIABLES = b'{"event":"VariablesPlaced"'


class EventWriter:
    """Appends events to one file with a `LineWriter`."""

    def __init__(self, path: Path, *, attempt: int, task: str) -> None:
        self.path, self._attempt, self._task = path, attempt, task
        self._lines = LineWriter(path)
        self._mask = SecretMask(os.environ)

    def write(self, event: Event) -> Event:
        """Append an event with the current time, the attempt and the task, and with masked secrets. Return it."""
        stamped = dataclasses.replace(
            event, time=time.time(), attempt=self._attempt, task=self._task, format_version=EVENT_FORMAT
        )
        if len(line := stamped.to_json(self._mask)) > MAX_EVENT_BYTES:
            text = f"an event of the kind {type(event).__name__} is not recorded: it has {len(line):,} characters"
            return self.write(Notice(level="warning", message=text))
        self._lines.write(line, most_waiting=_MAX_WAITING_STEPS if isinstance(event, StepsDone) else None)
        return stamped

    @property
    def behind(self) -> bool:
        """Return True if events wait for disk space."""
        return self._lines.behind

    def close(self) -> None:
        """Close the file. Events that could not be written are lost."""
        self._lines.close()


def append_events(path: Path, *events: Event, attempt: int, task: str) -> list[Event]:
    """Append events to a file and return them as written. Return an empty list if the disk is full."""
    try:
        writer = EventWriter(path, attempt=attempt, task=task)
    except OSError:
        return []
    written = [writer.write(event) for event in events]
    writer.close()
    return written


class EventReader:
    """Follows an event file. Each `read` yields the events appended since the previous read, without waiting."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> Iterator[Event]:
        """Yield the new events. Incomplete lines are left for later; invalid lines are skipped."""
        try:
            # a quick check: most of a thousand files have no new events
            if os.stat(self._path).st_size <= self._offset:
                return
            with open_regular(self._path) as file:
                file.seek(self._offset)
                for line, length in _lines(file):
                    self._offset += length
                    yield from parse_events(line)
        except (FileNotFoundError, NotRegularError):
            return


def parse_events(data: bytes) -> Iterator[Event]:
    """Yield the events in complete lines, skipping invalid lines."""
    # the first line of `read_tail` may be incomplete, which makes it invalid
    for line in data.splitlines():
        try:
            yield Event.from_json(line.decode())
        except ValueError:
            continue


def read_events(path: Path) -> list[Event]:
    """Return all events of a file, oldest first."""
    return list(EventReader(path).read())


def read_event_sample(path: Path) -> list[Event]:
    """Return the events of a file, oldest first; of many StepsDone or StepsTimed events, only a sample.

    A run of days has a million of these two, and parsing them takes a minute. If there are more than `MAX_REPORTS` of
    one kind, every second, third, ... is returned, so that at most `MAX_REPORTS` are left. The last one before each
    event of another kind is returned in any case, since it has the newest values.
    """
    kept: list[tuple[int, bytes]] = []
    waiting: dict[bytes, tuple[int, bytes]] = {}  # the newest line of each kind that is not kept so far
    seen = dict.fromkeys(_REPORTS, 0)
    try:
        intervals = {mark: -(-number // MAX_REPORTS) for mark, number in _count(path, _REPORTS).items()}
        with open_regular(path) as file:
            for number, (line, _) in enumerate(_lines(file)):
                if mark := next((mark for mark in _REPORTS if line.startswith(mark)), None):
                    seen[mark] += 1
                    waiting[mark] = number, line
                    if intervals[mark] <= 1 or seen[mark] % intervals[mark] == 0:
                        kept.append(waiting.pop(mark))
                else:
                    kept += [*waiting.values(), (number, line)]
                    waiting.clear()
    except (FileNotFoundError, NotRegularError):
        return []
    return list(parse_events(b"\n".join(line for _, line in sorted([*kept, *waiting.values()]))))


def _count(path: Path, marks: Sequence[bytes]) -> dict[bytes, int]:
    """Return how often each of these texts is in a file, except where two parts that are read meet."""
    found = dict.fromkeys(marks, 0)
    with open_regular(path) as file:
        while data := file.read(READ_BYTES):
            for mark in marks:
                found[mark] += data.count(mark)
    return found


def read_run_sample(run: RunDir) -> list[Event]:
    """Return the events of a run by time, including those of evaluations, predictions and exports.

    Of each file, they are those of `read_event_sample`.
    """
    return _in_order([read_event_sample(path) for path in run.event_files()])


def read_all_events_of(run: RunDir, *kinds: type[Event]) -> list[Event]:
    """Return those events of a run that are of the given kinds, in the order of `read_run_sample`."""
    return _in_order([read_events_of(path, *kinds) for path in run.event_files()])


def _in_order(files: Sequence[list[Event]]) -> list[Event]:
    # events of one file keep their order even if the clock was set back
    return list(heapq.merge(*files, key=lambda event: event.time))


def read_events_of(path: Path, *kinds: type[E]) -> list[E]:
    """Return those events of a file that are of the given kinds, oldest first, without parsing the many other lines."""
    marks = [f'"event":"{kind.__name__}"'.encode() for kind in kinds]
    try:
        with open_regular(path) as file:
            lines = [line for line, _ in _lines(file, partial=True) if any(mark in line for mark in marks)]
    except (FileNotFoundError, NotRegularError):
        return []
    return [event for event in parse_events(b"\n".join(lines)) if isinstance(event, kinds)]


def read_times(path: Path) -> list[Event]:
    """Return the events of a file, oldest first, without details that do not matter for times.

    Most lines of a long run are StepsDone events. A series of them is returned as two events: the first, and one that
    combines all others. Their `logs` are empty, because reading them takes ten times as long. Of StepsTimed events
    within such a series, only the last is returned. Large descriptions of variables are left out.
    """
    events: list[Event] = []
    # the steps, the seconds and the last line of StepsDone events that were not added yet
    steps, seconds, last, in_row = 0, 0.0, None, 0
    timed = b""  # the last line of StepsTimed events that were not added yet
    timed_is_newest = False

    def add_steps() -> None:
        nonlocal steps, seconds, last
        if last is not None:
            at, attempt, task, epoch, step, in_epoch, *_ = last.groups()
            events.append(
                StepsDone(
                    time=float(at), attempt=int(attempt), task=task.decode(), epoch=int(epoch), step=int(step),
                    step_in_epoch=int(in_epoch), steps=steps, seconds=seconds, logs={},
                )
            )  # fmt: skip
        steps, seconds, last = 0, 0.0, None

    def end_series() -> None:
        nonlocal timed, in_row
        if not timed_is_newest:
            events.extend(parse_events(timed))
        add_steps()
        if timed_is_newest:
            events.extend(parse_events(timed))
        timed, in_row = b"", 0

    try:
        with open_regular(path) as file:
            for line, _ in _lines(file, partial=True):
                match = _STEPS_DONE.match(line) if line.endswith(b"}}") else None
                if match:
                    if last is not None and last[2] != match[2]:
                        end_series()
                    elif in_row == 1:
                        add_steps()
                    steps, seconds, last, in_row = steps + int(match[7]), seconds + float(match[8]), match, in_row + 1
                    timed_is_newest = False
                elif line.startswith(_STEPS_TIMED):
                    if line.endswith(b"}"):  # not the beginning of a line that is still being written
                        timed, timed_is_newest = line, True
                elif not line.startswith(_VARIABLES):
                    end_series()
                    events += parse_events(line)
    except OSError:
        return []
    end_series()
    return events


def read_outline(path: Path) -> list[Event]:
    """Return the events that outline a run, without parsing the other lines.

    They are the first and the last events of attempts, starts of training, ends of epochs, and comparisons of numbers.
    """
    lines, before = list[bytes](), b""
    try:
        with open_regular(path) as file:
            for line, _ in _lines(file, partial=True):
                if line.startswith(_OUTLINE):
                    if before and line.startswith(_BEGINNINGS):
                        lines.append(before)  # the last event of the previous attempt
                    lines.append(line)
                    before = b""
                else:
                    before = line or before
    except OSError:
        return []
    return list(parse_events(b"\n".join([*lines, before])))


def _lines(file: IO[bytes], *, partial: bool = False) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file from its current position, each with its length in the file.

    The file is read in parts. A line that is too long for an event is replaced by an empty line.

    Args:
        partial: whether to yield an incomplete last line, too.
    """
    rest, length, is_long = b"", 0, False
    while data := file.read(READ_BYTES):
        first, *lines = data.split(b"\n")
        rest, length = b"" if is_long else rest + first, length + len(first)
        for line in lines:
            yield b"" if is_long else rest, length + 1
            rest, length, is_long = line, len(line), False
        if len(rest) > MAX_EVENT_BYTES:
            rest, is_long = b"", True
    if partial and rest:
        yield rest, length


def read_tail(path: Path) -> list[Event]:
    """Return the newest events of a file, oldest first; they usually cover at least the last ten seconds of a task."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return list(parse_events(file.read()))
    except OSError:
        return []


class LineWriter:
    """Appends lines to one file. Each line is written with a single `write`, so that lines are never mixed.

    Threads may share a writer. If the disk is full, lines wait in memory until a later line can be written.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        # with O_APPEND, each write goes to the end, also after writes of other processes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        # another process may have left an incomplete line on a full disk
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, line: str, *, most_waiting: int | None = None) -> None:
        """Append a line.

        Args:
            most_waiting: drop the line if this many lines are waiting; None to never drop it.
        """
        with self._lock:
            if most_waiting is None or len(self._waiting) < most_waiting:
                self._waiting.append((line + "\n").encode())
            self._flush()

    @property
    def behind(self) -> bool:
        """Return True if lines wait for disk space."""
        return bool(self._waiting)

    def _flush(self) -> None:
        while self._waiting:
            line = (b"\n" if self._torn else b"") + self._waiting[0]
            try:
                written = os.write(self._fd, line)
            except OSError:
                # the disk is full: try again with the next line
                return
            # do not write the rest of an incomplete line, since other processes may have written after it
            self._torn = written < len(line)
            if written < len(line):
                return
            # the complete line is in the file
            del self._waiting[0]

    def close(self) -> None:
        """Close the file. Lines that could not be written are lost."""
        os.close(self._fd)
