"""Events from threads that read examples, stored until training emits them between two steps."""

from __future__ import annotations

import threading

from distlaunch.base.events import Event

_lock = threading.Lock()
_events: list[Event] = []


def add_event(event: Event) -> None:
    with _lock:
        _events.append(event)


def take_events() -> list[Event]:
    """Return the events that were added since the last call."""
    with _lock:
        events, _events[:] = [*_events], []
    return events
