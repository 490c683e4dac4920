"""Follows the event files of an attempt, and turns events into the facts that supervision knows."""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.base.event_files import EventReader
from distlaunch.base.events import (
    EpochEnded,
    Evaluated,
    Event,
    ExampleSkipped,
    RunEnded,
    StepsDone,
    StepsTimed,
    TaskStarted,
    TrainingStarted,
)
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.facts import Closed, Fact, Finished, Progressed, Ready, Training

LAUNCHER = "launcher"


class EventFollower:
    """Reads what the tasks of an attempt report.

    Args:
        from_now: pass over what the run's events hold already. To be made before the tasks start.
    """

    def __init__(self, plan: LaunchPlan, *, from_now: bool = True) -> None:
        self._plan = plan
        self._lead = str(plan.lead)
        self._skipped: set[str] = set()  # in another pass another task may have the same example
        self._readers = [
            # the run's file has the events of earlier attempts, too
            EventReader(plan.events, from_end=from_now),
            *(EventReader(task.files.events) for task in plan.tasks if not task.unsupervised),
        ]

    def read(self) -> Iterator[Event]:
        """New events of this attempt. The lead task speaks for the run, the others only for themselves."""
        for reader in self._readers:
            for event in reader.read():
                ours = event.task in (self._lead, LAUNCHER) or isinstance(
                    event, TaskStarted | TrainingStarted | RunEnded | Evaluated | StepsTimed | ExampleSkipped
                )
                if event.attempt == self._plan.attempt and ours:
                    yield event

    def is_for_show(self, event: Event) -> bool:
        """Whether an event says something new about the run."""
        if isinstance(event, ExampleSkipped):
            is_new = event.example not in self._skipped
            self._skipped.add(event.example)
            return is_new
        if event.task in (self._lead, LAUNCHER) or isinstance(event, TaskStarted | StepsTimed):
            return True
        return isinstance(event, Evaluated) and event.of_evaluator


def facts_of(event: Event, now: float) -> list[Fact]:
    """What an event means for supervision."""
    match event:
        case TaskStarted():
            return [Ready(now, event.task)]
        case TrainingStarted() | StepsDone() | EpochEnded():
            return [Training(now)]
        case Evaluated():
            return [Progressed(now, event.task)]
        case RunEnded() if event.task != LAUNCHER:
            # a task that stopped has ended its part without having finished it
            return [Finished(now, event.task) if event.status == "done" else Closed(now, event.task)]
    return []
