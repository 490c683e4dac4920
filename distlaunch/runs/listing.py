"""The runs below a directory, each in a few facts, read from the beginning and the end of its events."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import parse_events, read_events
from distlaunch.base.events import EpochEnded, Event, Logs, StepsDone
from distlaunch.base.protocol import RUN_MODES
from distlaunch.base.regular_files import open_regular
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts
from distlaunch.base.run_files.submission import JobState, Submission
from distlaunch.runs.bottleneck import summary
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import (
    KILLED,
    RUNNING,
    attempt_report,
    configured_strategy,
    planned_mode,
    status_in_queue,
    step_times,
)

JobsOf = Callable[[Sequence[Submission]], Mapping[Submission, JobState]]

_HEAD_BYTES = 16 * 1024  # of the events with which a run begins
_TAIL_BYTES = 32 * 1024


@dataclass(frozen=True)
class RunSummary:
    """A run in one line.

    Attributes:
        status: `running`, `killed`, as in RunEnded, or `pending`, `submitted` or `cancelled`.
        step: where the last attempt has come to, which may be before what a killed attempt had reached.
        epoch: how many are complete there; `epochs`: of how many, if known.
        logs: the values of loss and metrics of the last complete epoch; before there is one, those so far.
        started: seconds since the epoch; `seconds`: from there to its last sign, or until now.
        culprit: who failed first, if it failed.
        job: the number of its submitted job; empty: it was not submitted.
        times: how the time of steps went, and `input` where training waited for that; as `report --json` has it.
    """

    path: str
    status: str
    strategy: str
    step: int
    epoch: int
    epochs: int | None
    logs: Logs
    started: float
    seconds: float
    attempts: int
    culprit: str = ""
    reason: str = ""
    times: dict[str, Any] | None = None
    job: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form of this run."""
        names = {name: value for name, value in vars(self).items() if name != "path"}
        return {"run": self.path, **names}


def find_runs(directory: Path, now: float, jobs_of: JobsOf = lambda jobs: {}) -> tuple[list[RunSummary], list[str]]:
    """Return all runs, the one started last at the end, and the names of folders that this user may not read.

    Raises UsageError if there is no such directory.

    Args:
        jobs_of: returns the states of submitted jobs.
    """
    if not directory.is_dir():
        raise UsageError(f"{display_path(directory)}: there is no such directory; give the `runs_dir` of your configs")
    if RunDir(directory).exists():
        raise UsageError(
            f"{display_path(directory)} is a run itself; `distlaunch report {display_path(directory)}` reports on it"
        )
    folders = [RunDir(path) for path in directory.iterdir() if path.is_dir()]
    closed = sorted(run.name for run in folders if not run.is_readable())
    runs = [run for run in folders if run.is_readable() and run.exists()]
    # all of them in one question; those that have reported their end need no question
    jobs = {run.path: job for run in runs if (job := run.live_submission())}
    states = jobs_of(list(jobs.values()))
    summaries = [summarize(run, now, states.get(jobs[run.path]) if run.path in jobs else None) for run in runs]
    return sorted(summaries, key=lambda each: (each.started, each.path)), closed


def summarize(run: RunDir, now: float | None = None, job: JobState | None = None) -> RunSummary:
    """Return the summary of a run.

    Args:
        now: the present time, for the duration of a running run.
        job: state of its submitted job; None if it has none or it is unknown.
    """
    # asked first: what the launcher writes before it lets go is then there to be read
    running = run.is_busy() or (job is not None and job.phase == "running")
    attempts = [number for number in run.attempts() if planned_mode(run, number) in RUN_MODES]
    training = attempts[-1] if attempts else None
    head, tail = _ends(run.events, training)
    events = [*head, *tail]
    facts = RunFacts.of(events)
    start, current = facts.start, _current(facts, training)
    done = current.epochs_done
    epochs = start.epochs if start else None  # of a start that is not read, it may have become more since
    first_at = _began(run, events)
    own = [event for event in events if training is None or event.attempt <= training]  # not an export's after it
    last_at = now if running and now is not None else own[-1].time if own else first_at
    end = None if training is None else attempt_report(run, training, facts)
    status = RUNNING if running else KILLED if end is None or end.status == RUNNING else end.status
    status = status if running else (status_in_queue(run, job) or status)
    # an attempt that failed after the run was done does not undo it
    status = "done" if status == "failed" and facts.finished else status
    return RunSummary(
        path=str(run.path),
        status=status,
        strategy=start.strategy if start else configured_strategy(run),
        step=current.step,
        epoch=done,
        epochs=epochs if epochs is None or epochs >= done else None,
        logs=_values(facts, current),
        started=first_at,
        seconds=max(0.0, last_at - first_at),
        attempts=len(attempts),
        culprit=end.culprit if end and status == "failed" else "",
        reason=end.reason if end and status == "failed" else "",
        times=summary(step_times(run, facts)),
        job=submission.job if (submission := run.submission()) else "",
    )


def _current(facts: RunFacts, training: int | None) -> AttemptFacts:
    """Return the last attempt that has trained; of a finished run, that which finished it.

    Args:
        training: the last attempt that was to train, after which others may have exported.
    """
    most = facts.ended.attempt if facts.ended is not None and facts.finished else training
    numbers = [number for number in sorted(facts.attempts, reverse=True) if most is None or number <= most]
    attempts = (facts.attempts[number] for number in numbers)
    return next((each for each in attempts if each.training is not None or each.step), AttemptFacts())


def _values(facts: RunFacts, current: AttemptFacts) -> Logs:
    """Return the values of the last complete epoch: what comes after it is of another, and without validation."""
    if not current.epochs_done:
        return current.logs
    ended = (event for event in reversed(facts.epochs) if event.epoch + 1 == current.epochs_done)
    return next((event.logs for event in ended), Logs())


def _began(run: RunDir, events: Sequence[Event]) -> float:
    """Return when the first process of a run started, in seconds since the epoch."""
    times = [event.time for event in events[:1]]
    if not run.has_config() and run.attempts():  # the tasks of scripts tell it, each in a file of its own
        files = next(iter(run.tasks(run.attempts()[0]).values()), None)
        times += [event.time for event in read_events(files.events)[:1]] if files else []
    return min(times) if times else run.path.stat().st_mtime


def _ends(path: Path, attempt: int | None) -> tuple[list[Event], list[Event]]:
    """Return the first events of a file, and enough of the last to know an attempt and its progress."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD_BYTES)
            length = _TAIL_BYTES
            while True:
                # nothing is read twice
                begin = max(len(head), size - length)
                file.seek(begin)
                tail = list(parse_events(file.read(size - begin)))
                if begin == len(head):
                    file.seek(0)
                    return list(parse_events(file.read(size))), []
                if _suffices(tail, attempt):
                    return list(parse_events(head)), tail
                # few reads, also of a file whose end is thousands of progress lines
                length *= 4
    except OSError:
        return [], []


def _suffices(events: Sequence[Event], attempt: int | None) -> bool:
    progress = [event for event in events if isinstance(event, StepsDone | EpochEnded) and event.logs]
    if not progress or not any(event.attempt == attempt for event in events):
        return False
    done = progress[-1].epoch + isinstance(progress[-1], EpochEnded)
    return not done or any(isinstance(event, EpochEnded) and event.epoch + 1 == done for event in progress)
