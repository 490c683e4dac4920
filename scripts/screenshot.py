"""Draws a recorded run as SVG, for the README: `python scripts/screenshot.py runs/NAME/events.jsonl picture.svg`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from distlaunch.base.errors import ExitCode
from distlaunch.base.event_files import read_events
from distlaunch.base.events import RunEnded, StepsDone
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.outcome import Outcome
from distlaunch.ui.progress.lines import event_line
from distlaunch.ui.progress.live import progress_line
from distlaunch.ui.progress.state import ProgressState
from distlaunch.ui.report import print_summary


def draw(events: Path, picture: Path, width: int = 80) -> None:
    """The run as it looked on a terminal, with its bar in the middle of an epoch, and its summary."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    run = RunDir(events.parent)
    console.print(Text(f"$ distlaunch train {run.name}.yaml"))
    state, recorded = ProgressState(), read_events(events)
    bars = [event for event in recorded if isinstance(event, StepsDone)]
    for event in recorded:
        state.add(event)
        line = event_line(event, state.now.training.epochs if state.now.training else 1)
        if line is not None:
            console.print(line, highlight=False)
        if bars and event is bars[len(bars) * 2 // 3]:
            console.print(progress_line(state))
    status = next((event.status for event in reversed(recorded) if isinstance(event, RunEnded)), "done")
    task = TaskPlan(Task("worker", 0), (), {}, run.task(0, "worker:0"))
    plan = LaunchPlan(run.path, 0, "train", (task,), 0, 0)
    print_summary(console, state, AttemptResult(plan, Outcome(status, ExitCode.DONE)))
    console.save_svg(str(picture), title="distlaunch")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
