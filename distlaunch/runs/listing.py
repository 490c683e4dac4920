"""Summarizes the runs in a directory.

The state of a run is read from its first and its last events. Between them, only the lines that outline the run are
parsed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import parse_events, read_events, read_outline, read_times
from distlaunch.base.events import EpochEnded, Event, Logs, NumbersChecked, StepsDone, TrainingStarted
from distlaunch.base.metric_names import LEARNING_RATE, falls
from distlaunch.base.protocol import RUN_MODES
from distlaunch.base.regular_files import open_regular
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts, kept_epochs
from distlaunch.base.run_files.submission import JobState, Submission
from distlaunch.runs.bottleneck import summary
from distlaunch.runs.goodput import Goodput, goodput_of, paused_s
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

_NUMBERS = ("equal", "unchecked", "documented", "differs")  # from good to bad
_RATE = re.compile(r"\w+, learning rate ([\d.e+-]+)")
_HEAD_BYTES = 16 * 1024  # holds the first events of a run
_TAIL_BYTES = 32 * 1024


class BestValue(NamedTuple):
    """The best value of a loss or metric.

    Attributes:
        epoch: the epoch of the value, from 0.
        step: the last step of that epoch.
    """

    value: float
    epoch: int
    step: int


@dataclass(frozen=True)
class RunSummary:
    """The facts of a run in `distlaunch runs`.

    Attributes:
        status: a status of RunEnded, `running`, `killed`, `pending`, `submitted` or `cancelled`.
        step: the last step of the last attempt. An earlier attempt that was killed may have got further.
        epoch: the number of epochs that were complete at that step.
        epochs: the total number of epochs, if known.
        logs: the loss and metrics of the last complete epoch, or the values so far in the first epoch.
        started: when the run started, in seconds since 1970.
        seconds: the duration from the start to the last event, or until now for a running run, without the pauses
            between attempts.
        culprit: the task that failed first, if the run has failed.
        times: step times and waits for input, as in `report --json`.
        job: the number of its submitted job; empty if it was not submitted.
        numbers: the result of comparing the first steps with one device: the worst status of all NumbersChecked events;
            empty if there is none.
        best: the best finite value of each loss and metric over all complete epochs.
        goodput: where the time of a training went; None if that was not asked for.
        learning_rate: the learning rate with which training began; None if it is not known, or not a single number.
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
    numbers: str = ""
    best: dict[str, BestValue] = field(default_factory=dict)
    goodput: Goodput | None = None
    learning_rate: float | None = None

    @property
    def examples_per_s(self) -> float | None:
        """Return the examples per second of all tasks together, or None if they have reported no times."""
        rates = [each["examples_per_s"] for each in self.times["tasks"].values()] if self.times else []
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form of this run."""
        names = {name: value for name, value in vars(self).items() if name != "path"}
        best = {name: value._asdict() for name, value in self.best.items()}
        return {"run": self.path, **names, "best": best, "goodput": self.goodput and self.goodput.to_plain()}


def find_runs(
    directory: Path, now: float, jobs_of: JobsOf = lambda jobs: {}, *, goodput: bool = False
) -> tuple[list[RunSummary], list[str]]:
    """Return all runs in a directory, in the order of their starts, and the names of folders without read permission.

    Args:
        jobs_of: returns the states of submitted jobs.
        goodput: see `summarize`.

    Raises:
        UsageError: there is no such directory, or it is a run.
    """
    if not directory.is_dir():
        raise UsageError(f"{display_path(directory)}: there is no such directory; give the `runs_dir` of your configs")
    if not RunDir(directory).is_readable():
        raise UsageError(f"{display_path(directory)}: permission denied")
    if RunDir(directory).exists():
        raise UsageError(
            f"{display_path(directory)} is a run itself; `distlaunch report {display_path(directory)}` reports on it"
        )
    folders = [RunDir(path) for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]
    unreadable = sorted(run.name for run in folders if not run.is_readable())
    runs = [run for run in folders if run.is_readable() and run.exists()]
    return summarize_all(runs, now, jobs_of, goodput=goodput), unreadable


def summarize_all(runs: Sequence[RunDir], now: float, jobs_of: JobsOf, *, goodput: bool) -> list[RunSummary]:
    """Return the summaries of runs, in the order of their starts.

    Args:
        now: see `summarize`.
        jobs_of: see `find_runs`.
        goodput: see `summarize`.
    """
    # query the states of all jobs at once, except of those that have reported their end
    jobs = {run.path: job for run in runs if (job := run.live_submission())}
    states = jobs_of(list(jobs.values()))
    summaries = [
        summarize(run, now, states.get(jobs[run.path]) if run.path in jobs else None, goodput=goodput) for run in runs
    ]
    return sorted(summaries, key=lambda each: (each.started, each.path))


def summarize(
    run: RunDir, now: float | None = None, job: JobState | None = None, *, goodput: bool = False
) -> RunSummary:
    """Return the summary of a run.

    Args:
        now: the current time, for the duration of a running run.
        job: the state of its submitted job; None if there is no job or its state is unknown.
        goodput: whether to compute the goodput, for which all events must be read.
    """
    # check the lock first: if it is free, the launcher's last events have been written
    running = run.is_busy() or (job is not None and job.phase == "running")
    attempts = [number for number in run.attempts() if planned_mode(run, number) in RUN_MODES]
    training = attempts[-1] if attempts else None
    head, tail = _read_head_and_tail(run.events, training)
    timeline = read_times(run.events) if goodput else read_outline(run.events)
    events = [*head, *_between(head, tail, timeline), *tail]
    facts = RunFacts.of(events)
    start, current = facts.start, _last_trained(facts, training)
    done = current.epochs_done
    epochs = start.epochs if start else None
    first_at = _started_at(run, events)
    # later attempts are exports and evaluations
    training_events = [event for event in events if training is None or event.attempt <= training]
    last_at = now if running and now is not None else training_events[-1].time if training_events else first_at
    end = None if training is None else attempt_report(run, training, facts)
    status = RUNNING if running else KILLED if end is None or end.status == RUNNING else end.status
    status = status if running else (status_in_queue(run, job) or status)
    # the status stays `done` if a later attempt has failed
    status = "done" if status == "failed" and facts.finished else status
    return RunSummary(
        path=str(run.path),
        status=status,
        strategy=start.strategy if start else configured_strategy(run),
        step=current.step,
        epoch=done,
        epochs=epochs if epochs is None or epochs >= done else None,
        logs=_last_values(facts, current),
        started=first_at,
        seconds=max(0.0, last_at - first_at - paused_s(timeline)),
        attempts=len(attempts),
        culprit=end.culprit if end and status == "failed" else "",
        reason=end.reason if end and status == "failed" else "",
        times=summary(step_times(run, facts)),
        job=submission.job if (submission := run.submission()) else "",
        numbers=max((event.status for event in facts.numbers), key=_NUMBERS.index, default=""),
        best=best_values(timeline),
        goodput=goodput_of(timeline) if goodput else None,
        learning_rate=_initial_rate(events),
    )


def best_values(events: Iterable[Event]) -> dict[str, BestValue]:
    """Return the best finite value of each loss and metric, the first of equal ones.

    A lower value is better if the name says so, like `val_loss` or `mae`; otherwise a higher one. Epochs that a resume
    has discarded do not count.
    """
    epochs = {event.epoch: event for event in kept_epochs(events)}
    best: dict[str, BestValue] = {}
    for number in sorted(epochs):
        for name, value in epochs[number].logs.items():
            if not math.isfinite(value) or name == LEARNING_RATE:
                continue
            known = best.get(name)
            if known is None or (value < known.value if falls(name) else value > known.value):
                best[name] = BestValue(value, number, epochs[number].step)
    return best


def _last_trained(facts: RunFacts, training: int | None) -> AttemptFacts:
    """Return the last attempt that began to train; for a finished run, the attempt that finished it.

    Args:
        training: the last attempt whose mode is training. Later attempts are exports and evaluations.
    """
    return facts.last_trained(facts.ended.attempt if facts.ended is not None and facts.finished else training)


def _last_values(facts: RunFacts, current: AttemptFacts) -> Logs:
    """Return the values of the last complete epoch, which include validation, or those so far in the first epoch."""
    if not current.epochs_done:
        return current.logs
    ended = (event for event in reversed(facts.epochs) if event.epoch + 1 == current.epochs_done)
    return next((event.logs for event in ended), Logs())


def _initial_rate(events: Iterable[Event]) -> float | None:
    """Return the learning rate that the first start of training reports; see `TrainingStarted.optimizer`."""
    starts = (event.optimizer for event in events if isinstance(event, TrainingStarted))
    found = _RATE.fullmatch(next(starts, ""))
    return float(found[1]) if found else None


def _started_at(run: RunDir, events: Sequence[Event]) -> float:
    """Return when the first process of a run started, in seconds since 1970."""
    times = [event.time for event in events[:1]]
    if not run.has_config() and run.attempts():  # each task of a script reports its start in a separate file
        files = next(iter(run.tasks(run.attempts()[0]).values()), None)
        times += [event.time for event in read_events(files.events)[:1]] if files else []
    return min(times) if times else run.path.stat().st_mtime


def _read_head_and_tail(path: Path, attempt: int | None) -> tuple[list[Event], list[Event]]:
    """Return the first events of a file, and enough of its last events to know the progress of an attempt."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD_BYTES)
            length = _TAIL_BYTES
            while True:
                # start after the head, which has been read already
                begin = max(len(head), size - length)
                file.seek(begin)
                tail = list(parse_events(file.read(size - begin)))
                if begin == len(head):
                    file.seek(0)
                    return list(parse_events(file.read(size))), []
                if _has_progress(tail, attempt):
                    return list(parse_events(head)), tail
                # grow quickly, since a file may end with thousands of progress events
                length *= 4
    except OSError:
        return [], []


def _between(head: Sequence[Event], tail: Sequence[Event], timeline: Iterable[Event]) -> list[Event]:
    """Return the events of a timeline that facts need from the part of a file between head and tail."""
    known = [*head, *tail]
    wanted = (event for event in timeline if isinstance(event, TrainingStarted | NumbersChecked))
    return [event for event in wanted if event not in known]


def _has_progress(events: Sequence[Event], attempt: int | None) -> bool:
    """Return True if events show the progress of an attempt and the end of its last complete epoch."""
    progress = [event for event in events if isinstance(event, StepsDone | EpochEnded) and event.logs]
    if not progress or not any(event.attempt == attempt for event in events):
        return False
    done = progress[-1].epoch + isinstance(progress[-1], EpochEnded)
    return not done or any(isinstance(event, EpochEnded) and event.epoch + 1 == done for event in progress)
