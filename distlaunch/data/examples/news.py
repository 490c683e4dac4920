"""What those who read examples have to tell. They work in threads of their own; training tells it between steps."""

from __future__ import annotations

import threading

from distlaunch.base.events import Event

_lock = threading.Lock()
_news: list[Event] = []


def tell(event: Event) -> None:
    with _lock:
        _news.append(event)


def news() -> list[Event]:
    """What has been told since this was asked last."""
    with _lock:
        told, _news[:] = [*_news], []
    return told
