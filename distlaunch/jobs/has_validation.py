"""Finds out if a run has validation data, before processes are started to read them."""

from __future__ import annotations

from pathlib import Path

from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import DataResolved
from distlaunch.base.run_dir import RunDir
from distlaunch.config.references.modules import ModuleMissingError, find_source
from distlaunch.config.run import RunConfig
from distlaunch.runs.paths import shown


def check_has_validation(run: RunDir, config: RunConfig, command: str) -> None:
    """Raise UsageError if the data function gave no validation data, and its code has not changed since.

    Args:
        command: that needs them, such as `evaluate`.
    """
    read = [event for event in read_events_of(run.events, DataResolved) if isinstance(event, DataResolved)]
    if not read or "validation" in read[-1].examples or "validation" in read[-1].seen:
        return
    if _may_have_changed(config, since=read[-1].time):
        return
    message = f"{shown(run.path)} has no validation data: {read[-1].name} gave none"
    raise UsageError(f"{message}; {command} the training data with `--split train`, or let the function return some")


def _may_have_changed(config: RunConfig, *, since: float) -> bool:
    """Return whether the data function's file, or a Python file beside it, is newer; True where that is not known."""
    if config.data.function is None:
        return False
    module = config.data.function.rpartition(":")[0]
    try:
        source = Path(module) if module.endswith(".py") else find_source(module, config.modules_folder)
        return source is None or any(file.stat().st_mtime > since for file in source.parent.glob("*.py"))
    except (OSError, ModuleMissingError):
        return True
