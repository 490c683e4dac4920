"""The rich console that prints all output of jobs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from distlaunch.base.visible import visible

_UNWRAPPED_WIDTH = 100_000  # columns


def _columns() -> int:
    """Return the width that COLUMNS asks for, or 0 if it asks for none."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() else 0


class JobConsole(Console):
    """A rich console that raises BrokenPipeError if its reader is gone, whereas rich itself would end the process.

    In a file or a pipe, where rich assumes 80 columns, it does not wrap lines, so that users can search them and copy
    commands.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if options.get("width") is not None or _columns():
            return
        if not self.writes_to_terminal:
            self.width = _UNWRAPPED_WIDTH
        elif "COLUMNS" in os.environ:
            # rich would use a COLUMNS of 0 and print nothing
            self.width = shutil.get_terminal_size().columns

    @property
    def writes_to_terminal(self) -> bool:
        """Return True if the output goes to a terminal; `is_terminal` is also True with FORCE_COLOR."""
        return self.file.isatty()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like rich, with visible control characters. Colors are not affected: they are styles, not text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
