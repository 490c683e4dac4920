"""Reads the report on a run from its directory, whether the run has ended or not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distlaunch.base.errors import ConfigError
from distlaunch.base.event_files import read_events_of, read_run_sample, read_tail
from distlaunch.base.events import (
    CheckpointSaved,
    DataResolved,
    EpochEnded,
    Evaluated,
    Event,
    ExampleSkipped,
    NumbersChecked,
    StepsTimed,
    TaskFailed,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.base.protocol import READ_MODES, RUN_MODES, SCRIPT_ENTRY
from distlaunch.base.regular_files import read_json
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts
from distlaunch.base.run_files.submission import JobState
from distlaunch.runs.bottleneck import summary
from distlaunch.runs.goodput import Goodput, run_goodput
from distlaunch.supervise.diagnose.exit_reason import read_error

_Kind = TypeVar("_Kind", bound=Event)

RUNNING = "running"
SCRIPT = "script"
KILLED = "killed"
"""Status of a run whose launcher has ended without recording an end, for example because its machine failed."""
PENDING = "pending"
"""Status of a run whose job waits in a queue."""
_CANCELLED = "cancelled"
"""Status of a run whose job was removed from the queue before it started."""
SUBMITTED = "submitted"
"""Status of a run whose job has written nothing yet, if this machine cannot query the job's queue."""


@dataclass(frozen=True)
class AttemptReport:
    """The report on an attempt.

    Attributes:
        mode: `train`, `run`, `evaluate`, `predict` or `export`.
        status: a status of RunEnded, `running` or `killed`. An attempt that only uses the model of a run is `done` once
            it has reported a result.
        culprit: the task that failed first; empty if none did.
        restarts: how many times each task was restarted while the others continued.
    """

    attempt: int
    mode: str
    status: str
    first_step: int | None = None
    last_step: int | None = None
    seconds: float | None = None
    culprit: str = ""
    host: str = ""
    reason: str = ""
    log: str = ""
    restarts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """Return True if the attempt trained or ran a script, rather than using the model of an existing run."""
        return self.mode in RUN_MODES


_NUMBERS = ("status", "part", "message", "deviation", "reference")


@dataclass(frozen=True)
class RunReport:
    """The report on a run with all of its attempts. Of an epoch that was trained several times, it has the last result.

    Attributes:
        command: the command of a script; empty for other runs.
        checkpoints: the checkpoints that still exist.
        best: the checkpoint of the best epoch, which may not be in `checkpoints`.
        evaluator: results of the evaluator task, by step.
        evaluations: results of `distlaunch evaluate`, in order.
        exports: the paths of the exports that still exist, by format.
        variables: the placement of variables, as in VariablesPlaced.
        mesh: the device mesh, as in VariablesPlaced.
        timed: the step times of each task in the last attempt that was timed.
        hosts: the host of each task in that attempt.
        skipped: training examples that failed and were left out in any attempt.
        numbers: comparisons of the steps with one device.
        export_failure: why the last export failed; empty if none failed, or if a later one succeeded.
        goodput: where the time of a training went.
    """

    path: str
    name: str
    strategy: str
    command: tuple[str, ...]
    status: str
    attempts: tuple[AttemptReport, ...]
    training: TrainingStarted | None
    data: DataResolved | None
    epochs: tuple[EpochEnded, ...]
    checkpoints: tuple[CheckpointSaved, ...]
    best: CheckpointSaved | None
    evaluator: tuple[Evaluated, ...]
    evaluations: tuple[Evaluated, ...]
    exports: dict[str, str]
    variables: list[dict[str, Any]]
    mesh: dict[str, Any] | None
    timed: dict[str, StepsTimed] = dataclasses.field(default_factory=dict)
    hosts: dict[str, str] = dataclasses.field(default_factory=dict)
    skipped: frozenset[str] = frozenset()
    export_failure: str = ""
    numbers: tuple[NumbersChecked, ...] = ()
    goodput: Goodput | None = None

    @property
    def all_checkpoints(self) -> tuple[CheckpointSaved, ...]:
        """Return the checkpoints by step, with the best one."""
        separate_best = () if self.best is None or self.best in self.checkpoints else (self.best,)
        return tuple(sorted((*self.checkpoints, *separate_best), key=lambda event: event.step))

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form of this report."""
        return {
            "run": self.path,
            "name": self.name,
            "strategy": self.strategy,
            **({"command": list(self.command)} if self.command else {}),
            "status": self.status,
            "attempts": [dataclasses.asdict(attempt) for attempt in self.attempts],
            "data": _select(self.data, "name", "source", "examples") if self.data else None,
            "epochs": [_select(event, "epoch", "step", "seconds", "logs", "learning_rate") for event in self.epochs],
            "checkpoints": [
                {**_select(event, "step", "path", "num_bytes"), "best": event is self.best}
                for event in self.all_checkpoints
            ],
            "evaluator": [_select(event, "step", "split", "logs") for event in self.evaluator],
            "evaluations": [_select(event, "step", "split", "logs") for event in self.evaluations],
            "times": summary(self.timed),
            "goodput": self.goodput and self.goodput.to_plain(),
            **({"skipped": sorted(self.skipped)} if self.skipped else {}),
            "numbers": [
                _select(event, "status", "part", "message", "deviation", "reference") for event in self.numbers
            ],
            "exports": self.exports,
            **({"export_failure": self.export_failure} if self.export_failure else {}),
            **({"mesh": self.mesh} if self.mesh else {}),
            "variables": self.variables,
        }


def read_report(run: RunDir, job: JobState | None = None, events: Iterable[Event] | None = None) -> RunReport:
    """Read the report of a run.

    Args:
        job: the state of its submitted job; None if there is no job or its state is unknown.
        events: the events of the run, as `read_run_sample` returns them; None to read them.
    """
    facts = RunFacts.of(read_run_sample(run) if events is None else events)
    timed = step_times(run, facts)
    attempts = tuple(attempt_report(run, number, facts) for number in run.attempts())
    saved = {
        # if a step was saved several times, keep the last
        event.step: dataclasses.replace(event, path=str(kept))
        for event in facts.checkpoints
        if (kept := run.kept_checkpoint(event.path)) is not None
    }
    return RunReport(
        path=str(run.path),
        name=run.name,
        strategy=facts.start.strategy if facts.start else configured_strategy(run),
        command=() if run.has_config() else _command(run),
        status=("" if run.is_busy() else status_in_queue(run, job)) or _status(attempts, facts),
        attempts=attempts,
        training=facts.start,
        data=facts.data,
        epochs=_sorted_events({event.epoch: event for event in facts.epochs}),
        checkpoints=_sorted_events(saved),
        best=_best(run, facts, saved),
        evaluator=_sorted_events({event.step: event for event in _evaluator_events(run)}),
        evaluations=tuple(facts.evaluations),
        exports={
            kind: str(kept) for kind, path in facts.exports.items() if (kept := run.kept_export(path)) is not None
        },
        export_failure=facts.export_failure,
        variables=facts.placed.variables if facts.placed else [],
        mesh=facts.placed.mesh if facts.placed else None,
        timed=timed,
        hosts=_hosts(run, facts, timed),
        skipped=_skipped_examples(run, facts),
        numbers=tuple(facts.numbers),
        goodput=run_goodput(run),
    )


def _best(run: RunDir, facts: RunFacts, saved: dict[int, CheckpointSaved]) -> CheckpointSaved | None:
    if (found := run.best_checkpoint()) is None:
        return None
    step, path = found
    if step in saved and saved[step].path == str(path):
        return saved[step]
    latest = next((event for event in reversed(facts.checkpoints) if event.step == step), None)
    return dataclasses.replace(latest, path=str(path)) if latest else None


def _status(attempts: Sequence[AttemptReport], facts: RunFacts) -> str:
    last = next((attempt.status for attempt in reversed(attempts) if attempt.is_run), KILLED)
    return "done" if last == "failed" and facts.finished else last


def attempt_report(run: RunDir, number: int, facts: RunFacts) -> AttemptReport:
    """Return the report on one attempt of a run."""
    attempt = facts.attempts.get(number, AttemptFacts())
    start, end, failure, mode = attempt.training, attempt.ended, attempt.failed, planned_mode(run, number)
    good = (end is not None and end.status != "failed") or attempt.has_result
    # problems in the config are not in the events, only in the files of tasks
    problems = "" if failure or good else config_problems(run, number)
    # locks show whether an attempt is running; of the attempts that train, only the newest can be running
    reads = mode in READ_MODES
    running = run.reader_is_busy(number) if reads else number == newest_training(run) and run.is_busy()
    if end is not None and attempt.stopped_after_failure:  # a stop request came before the restart
        status = end.status
    elif failure is not None or problems:
        status = "failed"
    elif running:
        status = RUNNING
    else:
        status = end.status if end else "done" if mode not in RUN_MODES and attempt.has_result else KILLED
    return AttemptReport(
        attempt=number,
        mode=mode,
        status=status,
        first_step=start.first_step if start else None,
        last_step=attempt.step if start or end else None,
        seconds=end.seconds if end else None,
        culprit=failure.failed_task if failure else "config" if problems else "",
        host=failure.host if failure else "",
        reason=failure.reason if failure else problems,
        log=_log(run, number, failure) if failure else "",
        restarts=dict(attempt.restarts),
    )


def _log(run: RunDir, number: int, failure: TaskFailed) -> str:
    """Return the current path of a failed task's log. If it is not in the run, return the path that was recorded."""
    if not failure.log:
        return ""
    # the run may have been moved or copied since
    kept = run.task(number, failure.failed_task).path / Path(failure.log).name
    return str(kept) if os.path.exists(kept) else failure.log


def newest_training(run: RunDir) -> int | None:
    """Return the number of the newest attempt that trained or ran a script, or None if there is none."""
    numbers = reversed(run.attempts())
    return next((number for number in numbers if planned_mode(run, number) not in READ_MODES), None)


def _command(run: RunDir) -> tuple[str, ...]:
    """Return a script and its arguments, without the Python command that starts it."""
    try:
        argv = read_json(run.plan)["tasks"][0]["argv"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ()
    earlier = {"distlaunch.tasks.script", "distlaunch.script_task"}
    if not {SCRIPT_ENTRY, *earlier} & set(argv):
        return tuple(argv)
    split = argv.index("--")
    return (*["-m"] * bool({"--kind=module", "--module"} & set(argv[:split])), *argv[split + 1 :])


def planned_mode(run: RunDir, number: int) -> str:
    """Return the mode of an attempt. An attempt without a plan was made in a notebook, where all attempts train."""
    try:
        return str(read_json(run.attempt_plan(number))["mode"])
    except (OSError, ValueError, KeyError, TypeError):
        return "train"


def config_problems(run: RunDir, number: int) -> str:
    """Return the problems that a task found in the config before training, or an empty string."""
    errors = (read_error(files) for files in run.tasks(number).values())
    found = next((error.problems for error in errors if error is not None and error.problems), ())
    return "; ".join(map(str, found))


def _evaluator_events(run: RunDir) -> list[Evaluated]:
    files = [
        files
        for attempt in run.attempts()
        for task, files in run.tasks(attempt).items()
        if task.startswith("evaluator:")
    ]
    return [event for each in files for event in read_events_of(each.events, Evaluated)]


def configured_strategy(run: RunDir) -> str:
    """Return the strategy in the run's config, or `script` for a run of a script."""
    if not run.has_config():
        return SCRIPT
    # imported here: pydantic takes 0.1 s to import, and most runs have reported their strategy
    from distlaunch.config.read.load import load_resolved

    with contextlib.suppress(ConfigError, OSError):
        return load_resolved(run.config).strategy.kind
    return "unknown"


def _sorted_events(events: dict[int, _Kind]) -> tuple[_Kind, ...]:
    return tuple(events[key] for key in sorted(events))


def _select(event: Event, *names: str) -> dict[str, Any]:
    return {name: getattr(event, name) for name in names}


def status_in_queue(run: RunDir, job: JobState | None) -> str:
    """Return the status of a run according to its submitted job, or an empty string.

    Args:
        job: the state of the job; None if there is no job or its state is unknown.
    """
    if job is not None and job.phase == "pending":
        return PENDING
    if run.attempts() or run.submission() is None:
        return ""
    if run.job_exit_code() is not None or (job is not None and job.word not in ("", "CANCELLED")):
        return "failed"
    return SUBMITTED if job is None else _CANCELLED


def step_times(run: RunDir, facts: RunFacts) -> dict[str, StepsTimed]:
    """Return the times of each task's steps in the last attempt that was timed.

    Args:
        facts: the facts in the run's events, with the times of the chief only. Other tasks have separate files.
    """
    starts = [number for number, attempt in facts.attempts.items() if attempt.training is not None]
    # an attempt that has just begun has reported no times, so look for the newest attempt with times
    for number in sorted(starts, reverse=True):
        events = [event for files in run.tasks(number).values() for event in _latest_times(files.events)]
        if found := {**facts.attempts[number].timed, **{event.task: event for event in events}}:
            return found
    return {}


def _hosts(run: RunDir, facts: RunFacts, timed: Mapping[str, StepsTimed]) -> dict[str, str]:
    """Return the host of each task in the attempt in which the tasks were timed."""
    if not timed:
        return {}
    number = next(iter(timed.values())).attempt
    starts = (read_events_of(files.events, TaskStarted) for files in run.tasks(number).values())
    chief = facts.attempts.get(number, AttemptFacts()).hosts
    return {**chief, **{event.task: event.host for events in starts for event in events[-1:]}}


def _skipped_examples(run: RunDir, facts: RunFacts) -> frozenset[str]:
    """Return the names of the examples that were skipped in any attempt."""
    files = (files.events for number in run.attempts() for files in run.tasks(number).values())
    examples = (event.example for path in files for event in read_events_of(path, ExampleSkipped))
    return frozenset((*facts.skipped, *examples))


def _latest_times(path: Path) -> list[StepsTimed]:
    """Return the last times in a file, if any."""
    return [event for event in read_tail(path) if isinstance(event, StepsTimed)][-1:]
