"""Warns of frameworks that this distlaunch is not tested with, once a run."""

from __future__ import annotations

from distlaunch.base.compat import frameworks, untested
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Notice
from distlaunch.base.run_dir import RunDir
from distlaunch.config.backend import Backend


def new_warnings(run: RunDir, backend: Backend) -> list[str]:
    """Warnings for the frameworks that a backend needs, without those that the run's events have already."""
    warnings = untested(frameworks(backend))
    if not warnings:
        return []
    reported = {event.message for event in read_events(run.events) if isinstance(event, Notice)}
    return [warning for warning in warnings if warning not in reported]
