"""The events of all tasks of a run. Tasks other than the chief keep their events in files of their own."""

from __future__ import annotations

from pathlib import Path

from distlaunch.base.event_files import read_events_of, read_tail
from distlaunch.base.events import ExampleSkipped, StepsTimed
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts


def step_times(run: RunDir, facts: RunFacts) -> dict[str, StepsTimed]:
    """How the time of each task's steps went, in the attempt that was timed last.

    Args:
        facts: of the run's own events; of these times, the other tasks keep theirs.
    """
    starts = [number for number, attempt in facts.attempts.items() if attempt.training is not None]
    # the newest that has reported any: one that has just begun has not
    for number in sorted(starts, reverse=True):
        events = [event for files in run.tasks(number).values() for event in _latest_times(files.events)]
        if found := {**facts.attempts[number].timed, **{event.task: event for event in events}}:
            return found
    return {}


def skipped_examples(run: RunDir, facts: RunFacts) -> frozenset[str]:
    """By what they are called; of any attempt."""
    files = (files.events for number in run.attempts() for files in run.tasks(number).values())
    examples = (event.example for path in files for event in read_events_of(path, ExampleSkipped))
    return frozenset((*facts.skipped, *examples))


def _latest_times(path: Path) -> list[StepsTimed]:
    """The last in a file, if any."""
    return [event for event in read_tail(path) if isinstance(event, StepsTimed)][-1:]
