"""Which lines of tasks are shown: tracebacks wait until it is known whether the failure report shows them."""

from __future__ import annotations

from collections.abc import Callable

_TRACEBACK = "Traceback (most recent call last):"
HOLD_S = 1.5
HOLD_LINES = 400  # a program that prints tracebacks without end is shown, too


class Screen:
    """Passes lines on, except those that a failure makes superfluous: they stay in the logs.

    A traceback is held back for a moment. If its task fails, the report shows it once and in full; if not, it was one
    that the program lives with, and it is shown. After a failure the other tasks' complaints are not shown at all.
    """

    def __init__(self, show: Callable[[str, str], None], clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._held: dict[str, tuple[float, list[str]]] = {}
        self._failed = False

    def line(self, task: str, text: str) -> None:
        if self._failed:
            return
        if task not in self._held and text.startswith(_TRACEBACK):
            self._held[task] = (self._clock(), [])
        if task not in self._held:
            self._show(task, text)
            return
        lines = self._held[task][1]
        lines.append(text)
        if len(lines) >= HOLD_LINES:
            self._release(task)

    def tick(self) -> None:
        """Shows what has been held for long enough."""
        for task in [task for task, (since, _) in self._held.items() if self._clock() >= since + HOLD_S]:
            self._release(task)

    def fail(self) -> None:
        """A task has failed: what is held, and what comes, is left to the report and the logs."""
        self._failed = True
        self._held.clear()

    def close(self) -> None:
        """No failure came: shows what is left."""
        for task in list(self._held):
            self._release(task)

    def _release(self, task: str) -> None:
        for text in self._held.pop(task)[1]:
            self._show(task, text)
