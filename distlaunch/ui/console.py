"""The console that everything is printed with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from distlaunch.base.visible import visible

_UNBROKEN = 100_000  # columns


class JobConsole(Console):
    """Rich ends the process when nobody reads its output any more. A job is worth more than its output.

    In a file or a pipe, where rich assumes 80 columns, lines are not broken: they are searched, and commands copied.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal and options.get("width") is None and "COLUMNS" not in os.environ:
            self.width = _UNBROKEN

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, with control characters of texts visible: colours are styles by now, and not text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
