"""The events that the controller itself adds to a run, above all its end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable

from distlaunch.base.event_files import EventWriter, read_events
from distlaunch.base.events import Event, RunEnded, TaskFailed
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.event_facts import LAUNCHER


def write_end(plan: LaunchPlan, status: str) -> Event | None:
    """Appends another end to an attempt that has failed, because the next was cancelled. None: the disk is full."""
    path = plan.events
    attempt = RunFacts.of(read_events(path)).attempts.get(plan.attempt, AttemptFacts())
    last = attempt.ended or RunEnded(status=status, step=0, epochs_done=0, seconds=0.0)
    try:
        writer = EventWriter(path, attempt=plan.attempt, task=LAUNCHER)
    except OSError:
        return None
    written = writer.write(dataclasses.replace(last, status=status))
    writer.close()
    return written


def last_end(run: RunDir) -> RunEnded | None:
    """How the run has ended, if it has."""
    return RunFacts.of(read_events(run.events)).ended


def write_end_again(run: RunDir, end: RunEnded) -> None:
    """A finished run stays finished when an attempt to go on with it has changed nothing."""
    with contextlib.suppress(OSError):  # a full disk
        writer = EventWriter(run.events, attempt=end.attempt, task=LAUNCHER)
        writer.write(end)
        writer.close()


def write_events(plan: LaunchPlan, events: Iterable[Event], *, task: str = LAUNCHER) -> None:
    """Appends events of the controller itself, or of a task that writes none, to the run's events."""
    with contextlib.suppress(OSError):  # a full disk; the screen still shows it
        path = plan.tasks[0].files.events if plan.is_beside else plan.events
        writer = EventWriter(path, attempt=plan.attempt, task=task)
        for event in events:
            writer.write(event)
        writer.close()


def end_events(
    plan: LaunchPlan, at: AttemptFacts, status: str, failure: Failure | None, *, step: int, seconds: float
) -> list[Event]:
    """Events about the end of an attempt that the tasks could no longer write."""
    events: list[Event] = []
    if failure is not None:
        log = str(failure.log or "")
        events.append(TaskFailed(failed_task=failure.task, host=failure.host, reason=failure.reason, log=log))
    # after Ctrl-C the task only knows that it was stopped
    is_missing = at.ended is None or (status == "interrupted" and at.ended.status != status)
    if plan.is_run and is_missing and not plan.is_beside:
        events.append(RunEnded(status=status, step=step, epochs_done=at.epochs_done, seconds=seconds, logs=at.logs))
    elif plan.mode == "train" and at.ended is not None and plan.lead != plan.chief:
        events.append(at.ended)  # the task reported it beside its logs; the run's own file must have its end too
    return events
