"""Converts events of tasks to facts for supervision, and writes the launcher's own events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from distlaunch.base.event_files import EventReader, append_events, read_event_sample
from distlaunch.base.events import (
    LAUNCHER,
    AttemptStarted,
    EpochEnded,
    Evaluated,
    Event,
    ExampleSkipped,
    RunEnded,
    StepsDone,
    StepsTimed,
    TaskFailed,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.base.run_files.run_facts import AttemptFacts, RunFacts
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.facts import Closed, Fact, Finished, Progressed, Ready, Training


def write_end(plan: LaunchPlan, status: str) -> Event | None:
    """Append another end to a failed attempt whose restart was canceled; return None if the disk is full."""
    attempt = RunFacts.of(read_event_sample(plan.events)).attempts.get(plan.attempt, AttemptFacts())
    last = attempt.ended or RunEnded(status=status, step=0, epochs_done=0, seconds=0.0)
    end = dataclasses.replace(last, status=status)
    return next(iter(append_events(plan.events, end, attempt=plan.attempt, task=LAUNCHER)), None)


def write_start(plan: LaunchPlan, waited_s: float) -> None:
    """Record that the tasks of a plan are about to be started.

    Only the launcher of the chief does so, and only if the plan trains a model.

    Args:
        waited_s: see `AttemptStarted`.
    """
    if plan.mode == "train" and plan.lead == plan.chief:
        append_events(plan.events, AttemptStarted(waited_s=waited_s), attempt=plan.attempt, task=LAUNCHER)


def write_events(plan: LaunchPlan, events: Iterable[Event], *, task: str = LAUNCHER) -> None:
    """Append events of the launcher, or of a task that cannot write events itself, to the run's events."""
    path = plan.tasks[0].files.events if plan.is_beside else plan.events
    append_events(path, *events, attempt=plan.attempt, task=task)


def end_events(
    plan: LaunchPlan, at: AttemptFacts, status: str, failure: Failure | None, *, step: int, seconds: float
) -> list[Event]:
    """Return the events about an attempt's end that the launcher must write, because the run's file lacks them."""
    events: list[Event] = []
    if failure is not None:
        log = str(failure.log or "")
        events.append(TaskFailed(failed_task=failure.task, host=failure.host, reason=failure.reason, log=log))
    # after Ctrl-C the task reports "stopped", but the run was interrupted
    is_missing = at.ended is None or (status == "interrupted" and at.ended.status != status)
    if plan.is_run and is_missing and not plan.is_beside:
        events.append(RunEnded(status=status, step=step, epochs_done=at.epochs_done, seconds=seconds, logs=at.logs))
    elif plan.mode == "train" and at.ended is not None and plan.lead != plan.chief:
        events.append(at.ended)  # the task reported it in its own file; the run's file needs it, too
    return events


class EventFollower:
    """Reads the events of an attempt's tasks. Create it before the tasks start.

    Args:
        from_now: skip the events that the run's file already holds.
    """

    def __init__(self, plan: LaunchPlan, *, from_now: bool = True) -> None:
        self._plan = plan
        self._lead = str(plan.lead)
        self._skipped: set[str] = set()  # several tasks may report the same example, in different passes over the data
        self._readers = [
            # the run's file also has the events of earlier attempts
            EventReader(plan.events, from_end=from_now),
            *(EventReader(task.files.events) for task in plan.tasks if not task.unsupervised),
        ]

    def read(self) -> Iterator[Event]:
        """Yield new events of this attempt. Only the lead task reports events about the run as a whole."""
        for reader in self._readers:
            for event in reader.read():
                is_relevant = event.task in (self._lead, LAUNCHER) or isinstance(
                    event, TaskStarted | TrainingStarted | RunEnded | Evaluated | StepsTimed | ExampleSkipped
                )
                if event.attempt == self._plan.attempt and is_relevant:
                    yield event

    def is_for_show(self, event: Event) -> bool:
        """Return True if an event has news about the run that users should see."""
        if isinstance(event, ExampleSkipped):
            is_new = event.example not in self._skipped
            self._skipped.add(event.example)
            return is_new
        if event.task in (self._lead, LAUNCHER) or isinstance(event, TaskStarted | StepsTimed):
            return True
        return isinstance(event, Evaluated) and event.of_evaluator


def facts_of(event: Event, now: float) -> list[Fact]:
    """Return the facts for supervision that follow from an event."""
    match event:
        case TaskStarted():
            return [Ready(now, event.task)]
        case TrainingStarted() | StepsDone() | EpochEnded():
            return [Training(now)]
        case Evaluated():
            return [Progressed(now, event.task)]
        case RunEnded() if event.task != LAUNCHER:
            # a task that was stopped has ended its work without finishing it
            return [Finished(now, event.task) if event.status == "done" else Closed(now, event.task)]
        case _:
            pass
    return []
