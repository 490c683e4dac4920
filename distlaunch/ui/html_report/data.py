"""The data of `report.html`, from a run's directory. The page's script draws it."""

from __future__ import annotations

import bisect
import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

import distlaunch
from distlaunch.base.errors import ConfigError
from distlaunch.base.event_files import read_event_sample, read_events_of
from distlaunch.base.events import (
    EpochEnded,
    Evaluated,
    Event,
    ModelBuilt,
    StepsDone,
    StepsTimed,
    TrainingStarted,
)
from distlaunch.base.plain_types import is_dict
from distlaunch.base.regular_files import open_regular, read_json
from distlaunch.base.run_dir import RunDir
from distlaunch.config.base import Section
from distlaunch.config.read.load import load_resolved
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies import MODELS
from distlaunch.runs.bottleneck import resources
from distlaunch.runs.paths import display_path
from distlaunch.runs.report import AttemptReport, RunReport
from distlaunch.ui import words
from distlaunch.ui.placement import placement_sections
from distlaunch.ui.run_report import facts
from distlaunch.ui.tables import line_style_for

MAX_POINTS = 1_000
"""Maximum number of points of a curve. Longer curves keep the extremes and the last point of groups of neighbors."""
_LOG_BYTES, _LOG_LINES = 64 << 10, 40
"""Maximum size of the end of a failed task's log that is shown: bytes and lines."""
_VALIDATION = "val_"

Curve = dict[str, list[float]]
"""The coordinates of points, `x` and `y`."""


def page_data(run: RunDir, report: RunReport, events: Sequence[Event]) -> dict[str, Any]:
    """Return the content of the page as plain data.

    Keys with curves are `curves` (metrics) and `speed` (times of tasks). The x coordinates are numbers of steps since
    the run began; `epochs` has the step at which each epoch ended.

    Args:
        events: the events of the run, as `read_run_sample` returns them.
    """
    history = _History()
    for event in events:
        history.add(event)
    model = next((event for event in reversed(events) if isinstance(event, ModelBuilt)), None)
    style = line_style_for("utf-8")
    return {
        "name": report.name,
        "status": report.status,
        "version": distlaunch.__version__,
        "facts": [[name, value] for name, value, _ in facts(report)],
        "curves": history.curves(),
        "epochs": [{"epoch": event.epoch + 1, "step": event.step, "seconds": event.seconds} for event in report.epochs],
        "steps_per_epoch": report.training.steps_per_epoch if report.training else None,
        "restarts": history.restarts,
        "speed": _speed(run, report, events),
        "checkpoints": [
            {
                "step": event.step,
                "path": display_path(event.path),
                "size": words.size(event.num_bytes),
                "seconds": event.seconds,
                "stalled": event.stalled_s,
                "best": event is report.best,
            }
            for event in report.all_checkpoints
        ],
        "attempts": [_attempt(run, attempt) for attempt in report.attempts],
        "evaluations": [_evaluation(event) for event in (*report.evaluator, *report.evaluations)],
        "exports": {kind: display_path(path) for kind, path in report.exports.items()},
        "layers": [] if model is None else model.layers,
        "parameters": report.training.parameters if report.training else None,
        "placement": ["\n".join(lines) for lines in placement_sections(report.variables, report.mesh, style)]
        if report.variables
        else [],
        "config": _config(run),
        "environment": _environment(run),
    }


def curves_of(run: RunDir) -> dict[str, Any]:
    """Return the curves of a run's metrics by epoch, and the steps at which its epochs ended, for a comparison."""
    history = _History()
    ends: dict[int, int] = {}
    for event in read_events_of(run.events, TrainingStarted, EpochEnded):
        history.add(event)
        if isinstance(event, EpochEnded):
            ends[event.epoch] = event.step
    epochs = [{"epoch": epoch + 1, "step": step} for epoch, step in sorted(ends.items())]
    return {"curves": history.curves(), "epochs": epochs}


class _History:
    """Curves of the metrics over all attempts. A step that was trained again has its last values only."""

    def __init__(self) -> None:
        self._steps: dict[str, list[tuple[int, float]]] = {}
        self._epochs: dict[str, list[tuple[int, float]]] = {}
        self.restarts: list[dict[str, Any]] = []

    def add(self, event: Event) -> None:
        match event:
            case TrainingStarted():
                for points in (*self._steps.values(), *self._epochs.values()):
                    _forget_after(points, event.first_step)
                if event.attempt or event.first_step:
                    self.restarts.append({"step": event.first_step, "attempt": event.attempt})
            case StepsDone():
                for name, value in event.logs.items():
                    self._steps.setdefault(name, []).append((event.step, value))
            case EpochEnded():
                for name, value in event.logs.items():
                    self._epochs.setdefault(name, []).append((event.step, value))
            case _:
                pass

    def curves(self) -> dict[str, dict[str, Curve]]:
        """Return the curves of each metric: `steps` within epochs, `epochs`, and `validation` by epoch."""
        names = dict.fromkeys(name.removeprefix(_VALIDATION) for name in (*self._epochs, *self._steps))
        found = {
            name: {
                "steps": _curve(self._steps.get(name, ())),
                "epochs": _curve(self._epochs.get(name, ())),
                "validation": _curve(self._epochs.get(_VALIDATION + name, ())),
            }
            for name in names
        }
        return {name: {kind: curve for kind, curve in parts.items() if curve["x"]} for name, parts in found.items()}


def _forget_after(points: list[Any], step: int) -> None:
    """Remove the points of later steps, which will be trained again."""
    while points and points[-1][0] > step:
        points.pop()


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    kept = thinned(points, MAX_POINTS)
    return {"x": [x for x, _ in kept], "y": [_short(y) for _, y in kept]}


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points of a curve, which keep its extremes and its last point."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 3))
    kept: dict[int, None] = {}
    for start in range(0, len(points), size):
        group = range(start, min(start + size, len(points)))
        # NaN compares as neither smaller nor larger, so it would hide the extremes after it
        numbers = [at for at in group if not math.isnan(points[at][1])] or group
        extremes = min(numbers, key=lambda at: points[at][1]), max(numbers, key=lambda at: points[at][1])
        kept.update(dict.fromkeys(sorted({*extremes, group[-1]})))
    return [points[at] for at in kept]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _speed(run: RunDir, report: RunReport, events: Sequence[Event]) -> dict[str, dict[str, Curve]]:
    """Return curves of each task that computes steps, from the differences of its reports.

    Args:
        events: the events of the run, as `read_run_sample` returns them.
    """
    starts: dict[int, int] = {}
    times: dict[int, list[StepsTimed]] = {}
    progress: dict[int, list[StepsDone]] = {}
    for event in events:
        if isinstance(event, TrainingStarted):
            starts.setdefault(event.attempt, event.first_step)
        elif isinstance(event, StepsTimed):
            times.setdefault(event.attempt, []).append(event)
        elif isinstance(event, StepsDone):
            progress.setdefault(event.attempt, []).append(event)
    strategy = MODELS.get(report.strategy)
    counts_own_steps = strategy is not None and strategy.has_coordinator
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for number in [attempt.attempt for attempt in report.attempts if attempt.is_run]:
        started = starts.get(number)
        if started is None:
            continue  # the attempt trained nothing, so it replaces no steps of earlier attempts
        found: dict[str, list[StepsTimed]] = {}
        # the run's file has the times of the chief, and other tasks have files of their own
        others = [event for files in run.tasks(number).values() for event in read_event_sample(files.events)]
        for event in (*times.get(number, ()), *others):
            if isinstance(event, StepsTimed):
                found.setdefault(event.task, []).append(event)
        for points in (points for own in curves.values() for points in own.values()):
            _forget_after(points, started)
        for task, reports in found.items():
            if counts_own_steps:
                steps = _steps_at(reports, started, progress.get(number, ()))
            else:
                steps = [started + event.steps for event in reports]
            _add_speed(curves.setdefault(task, {}), steps, reports)
    return {task: {name: _curve(points) for name, points in own.items()} for task, own in sorted(curves.items())}


def _steps_at(events: Sequence[Event], first_step: int, progress: Sequence[StepsDone]) -> list[int]:
    """Return the step of the run at the time of each event.

    Args:
        first_step: the step with which the attempt began.
        progress: reports of the chief in this attempt, by time.
    """
    times = [each.time for each in progress]
    numbers = [bisect.bisect_right(times, event.time) for event in events]
    return [progress[number - 1].step if number else first_step for number in numbers]


def _add_speed(
    curves: dict[str, list[tuple[float, float]]], steps_of_run: Sequence[int], events: Sequence[StepsTimed]
) -> None:
    """Add points of one task in one attempt.

    Args:
        curves: the points of the task, by the name of the value.
        steps_of_run: the step of the run at each of the events.
        events: the reports of the task.
    """
    before: StepsTimed | None = None
    for x, event in zip(steps_of_run, events, strict=True):
        if before is not None and event.steps < before.steps:
            before = None  # the task was restarted alone, and its sums began at 0 again
        steps = event.steps - (before.steps if before else 0)
        seconds = event.seconds - (before.seconds if before else 0.0)
        if steps > 0 and seconds > 0:
            examples = event.examples - (before.examples if before else 0.0)
            waited = event.input_s - (before.input_s if before else 0.0)
            cpu = event.cpu_s - (before.cpu_s if before else 0.0)
            values = {
                "step_ms": 1e3 * seconds / steps, "examples_per_s": examples / seconds,
                "input_percent": 100 * waited / seconds, "cores": cpu / seconds,
            }  # fmt: skip
            if event.peers_s is not None:
                values["peers_percent"] = 100 * (event.peers_s - ((before and before.peers_s) or 0.0)) / seconds
            for name, value in {**values, **resources(event)}.items():
                curves.setdefault(name, []).append((x, value))
        before = event


def _attempt(run: RunDir, attempt: AttemptReport) -> dict[str, Any]:
    return {
        **asdict(attempt),
        "log": display_path(attempt.log) if attempt.log else "",
        "lines": _log_lines(attempt.log),
    }


def _log_lines(log: str) -> list[str]:
    """Return the last lines of a log; empty if it cannot be read."""
    if not log:
        return []
    with contextlib.suppress(OSError), open_regular(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        return file.read(_LOG_BYTES).decode(errors="replace").splitlines()[-_LOG_LINES:]
    return []


def _evaluation(event: Evaluated) -> dict[str, Any]:
    return {"step": event.step, "split": event.split, "task": event.task, "logs": event.logs}


def _config(run: RunDir) -> list[dict[str, Any]]:
    """Return the lines of the config, and whether each differs from the default."""
    if not run.has_config():
        return []
    with contextlib.suppress(ConfigError, OSError, ValueError):
        config = load_resolved(run.config)
        plain = config.to_public()
        defaults = _defaults(config)
        return [
            {"text": line, "differs": differs}
            for key, value in plain.items()
            for line, differs in _lines({key: value}, {key: defaults.get(key)}, 0)
        ]
    return []


def _defaults(config: RunConfig) -> dict[str, Any]:
    """Return the values of a config with the same model, data and strategy, in which all else has its default."""
    data = config.data
    required: dict[str, Any] = {
        "model": _required(config.model),
        "data": {"function": data.function, "tfds": None if data.tfds is None else _required(data.tfds)},
        "strategy": _required(config.strategy),
    }
    with contextlib.suppress(ValueError):
        return RunConfig.model_validate(required).to_public()
    return {}


def _required(section: Section) -> dict[str, Any]:
    """Return the values of a section that have no default."""
    return {name: getattr(section, name) for name, each in type(section).model_fields.items() if each.is_required()}


def _lines(value: Mapping[str, Any], default: Mapping[str, Any], depth: int) -> Iterable[tuple[str, bool]]:
    """Yield the lines of a value as YAML, each with whether it differs from the default."""
    indent = "  " * depth
    for key, each in value.items():
        other = default.get(key)
        if is_dict(each) and each:
            yield f"{indent}{key}:", False
            yield from _lines(each, other if is_dict(other) else {}, depth + 1)
        else:
            text = yaml.safe_dump(each, default_flow_style=True, width=10_000, sort_keys=False)
            yield f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}", each != other


def _environment(run: RunDir) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return read_json(run.environment)
    return {}
