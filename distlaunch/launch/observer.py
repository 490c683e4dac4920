"""What the launcher tells while it works; `distlaunch.ui` shows it."""

from __future__ import annotations

from typing import Protocol

from distlaunch.events import Event
from distlaunch.launch.plan import LaunchPlan


class Observer(Protocol):
    """Takes what there is to show. An OSError from it (a terminal that is gone) ends the showing, not the job."""

    def started(self, plan: LaunchPlan) -> None:
        """The processes of an attempt are about to start."""

    def event(self, event: Event) -> None:
        """An event of the run; those of other tasks than the first tell about these tasks only."""

    def line(self, task: str, text: str) -> None:
        """A line that a task printed."""

    def note(self, text: str) -> None:
        """Something the launcher itself has to say."""

    def tick(self, now: float) -> None:
        """Time passes; called several times a second."""

    def ended(self) -> None:
        """The processes of an attempt have ended."""


class Silent:
    """Shows nothing."""

    def started(self, plan: LaunchPlan) -> None: ...
    def event(self, event: Event) -> None: ...
    def line(self, task: str, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self, now: float) -> None: ...
    def ended(self) -> None: ...


class Sturdy:
    """Passes on to an observer for as long as that can show anything."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def started(self, plan: LaunchPlan) -> None:
        self._tell("started", plan)

    def event(self, event: Event) -> None:
        self._tell("event", event)

    def line(self, task: str, text: str) -> None:
        self._tell("line", task, text)

    def note(self, text: str) -> None:
        self._tell("note", text)

    def tick(self, now: float) -> None:
        self._tell("tick", now)

    def ended(self) -> None:
        self._tell("ended")

    def _tell(self, method: str, *arguments: object) -> None:
        try:
            getattr(self._observer, method)(*arguments)
        except OSError:
            self._observer = Silent()
