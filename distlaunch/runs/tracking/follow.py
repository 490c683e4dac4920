"""Follows a run's events and sends their values to a tracker.

`python -m distlaunch.runs.tracking.follow NAME RUN [--unless-busy]` ends with a code of `SendOutcome`. With
`--unless-busy`, it does not wait for another process that sends the run to the tracker.

This separate process reads the events from the disk. So a tracker that is slow, fails or cannot be reached never delays
or fails the run, and values that were not sent can be sent later. The process ends when its standard input ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from distlaunch.base.event_files import EventReader
from distlaunch.base.events import EpochEnded, Event, RunEnded, StepsDone, StepsTimed, TrainingStarted
from distlaunch.base.file_locks import lock
from distlaunch.base.priority import yield_to_training
from distlaunch.base.regular_files import read_json
from distlaunch.base.run_dir import RunDir
from distlaunch.config.run import TrackerName
from distlaunch.runs.bottleneck import resources
from distlaunch.runs.report import KILLED
from distlaunch.runs.settings import read_settings
from distlaunch.runs.tracking.outcome import UNLESS_BUSY, SendOutcome
from distlaunch.runs.tracking.record import Stored, StoredRecord
from distlaunch.runs.tracking.trackers import Row, Tracker, open_tracker, target_of

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
_LARGEST_SHARE = 0.005
"""Share of a core that sending may take: more values are sent less often, since training comes first."""
_BATCH = "batch/"
"""Prefix of values within an epoch, as in Keras's own loggers."""
_SPEED = "speed/"


class Follower:
    """Sends each value of a run once, over all attempts and processes.

    Steps that were sent are not sent again when they are trained again. Their values are the same after a restart, but
    not after a resume with other settings. `StoredRecord` has the steps whose values the tracker has stored.
    """

    def __init__(self, name: TrackerName, run: RunDir) -> None:
        self._name: TrackerName = name
        self._run = run
        self._reader = EventReader(run.events)
        self._record = StoredRecord(run, name, target_of(name))
        self._stored = self._record.read()
        self._sent = self._stored
        """The part of the run that the tracker has once it has stored all values that were sent."""
        self._tracker: Tracker | None = None
        self._started: float | None = None
        self._status, self._ended = "", 0.0
        self._last_at = 0.0
        self._speed: dict[str, float] = {}
        """Values of the newest StepsTimed event. They are sent with the next step, so that none is sent twice."""

    def send_new(self) -> None:
        """Send the values of new events. The tracker is opened for the first of them."""
        rows = [row for event in self._reader.read() if (row := self._row_of(event))]
        if not rows:
            return
        if self._tracker is None:
            self._tracker = self._open()
        self._tracker.log(rows)
        if self._tracker.stores_at_once:
            self._write(self._sent)

    def _row_of(self, event: Event) -> Row | None:
        """Return the values of an event that are to be sent, and take them as sent."""
        if self._started is None:
            self._started = event.time
        self._last_at = event.time
        match event:
            case TrainingStarted():
                self._status, self._speed = "", {}
            case StepsTimed():
                self._speed = _speed_of(event)
            case StepsDone():
                speed, self._speed = self._speed, {}
                if event.step > self._sent.step:
                    self._sent = replace(self._sent, step=event.step)
                    values = {_BATCH + name: value for name, value in event.logs.items()}
                    return self._new_row(event.step, event.time, values | speed)
            case EpochEnded() if event.step > self._sent.epoch_step:
                self._sent = replace(self._sent, epoch_step=event.step)
                rate = {} if event.learning_rate is None else {"learning_rate": event.learning_rate}
                return self._new_row(event.step, event.time, {"epoch": event.epoch + 1.0, **rate, **event.logs})
            case RunEnded():
                self._status, self._ended = event.status, event.time
            case _:
                pass
        return None

    def _new_row(self, step: int, time: float, values: Mapping[str, float]) -> Row:
        self._sent = replace(self._sent, rows=self._sent.rows + 1)
        return Row(self._sent.rows - 1, step, time, values)

    def _open(self) -> Tracker:
        tracker = open_tracker(
            self._name, self._run.path, self._run.name, self._stored.id, _config_of(self._run),
            started=self._started or 0.0,
        )  # fmt: skip
        self._sent = replace(self._sent, id=tracker.id)
        self._write(replace(self._stored, id=tracker.id))
        return tracker

    def finish(self) -> bool:
        """Send the remaining values, and close the run in the tracker.

        Returns:
            False if the tracker had everything before.
        """
        self.send_new()
        if not self._status and not self._run.is_busy():
            # the launcher has recorded no end
            self._status, self._ended = KILLED, self._last_at
        if self._tracker is None:
            if not self._stored.id or self._stored.ended == self._ended:
                return False
            self._tracker = self._open()
        self._tracker.finish(self._status, self._ended)
        self._write(replace(self._sent, ended=self._ended))
        return True

    def _write(self, stored: Stored) -> None:
        self._stored = stored
        self._record.write(stored)


def _speed_of(event: StepsTimed) -> dict[str, float]:
    """Return what a task has measured since its attempt began, and its memory and GPUs now."""
    found = {"step_median_ms": 1e3 * event.step_median_s, "step_p99_ms": 1e3 * event.step_p99_s}
    if event.seconds:
        found["examples_per_s"] = event.examples / event.seconds
        found["input_percent"] = 100 * event.input_s / event.seconds
        if event.peers_s is not None:
            found["peers_percent"] = 100 * event.peers_s / event.seconds
        found["busy_cores"] = event.cpu_s / event.seconds
    found |= resources(event)
    return {_SPEED + name: value for name, value in found.items()}


def _config_of(run: RunDir) -> dict[str, Any]:
    """Return the values of the run's config by dotted key, and the commit of the code."""
    flat = read_settings(run)
    with contextlib.suppress(OSError, ValueError, KeyError):
        flat["git_commit"] = read_json(run.environment)["git"]["commit"]
    return flat


def main() -> None:
    name, run, waits = cast("TrackerName", sys.argv[1]), RunDir(sys.argv[2]), UNLESS_BUSY not in sys.argv
    yield_to_training()
    with (run.path / "tracking" / f"{name}.lock").open("wb") as file:
        # the process of a launcher that was killed may still be sending
        try:
            lock(file.fileno(), fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            sys.exit(SendOutcome.BUSY)
        follower = Follower(name, run)
        # standard input ends with the launcher, whatever ends it
        pause_s = _SHORTEST_PAUSE_S
        while not select.select([sys.stdin], [], [], pause_s)[0]:
            began = time.process_time()
            follower.send_new()
            busy_s = time.process_time() - began
            pause_s = min(max(_SHORTEST_PAUSE_S, busy_s / _LARGEST_SHARE), _LONGEST_PAUSE_S)
        sys.exit(SendOutcome.SENT if follower.finish() else SendOutcome.NOTHING_NEW)


if __name__ == "__main__":
    main()
