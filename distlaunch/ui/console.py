"""The console that everything is printed with."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class JobConsole(Console):
    """Rich ends the process when nobody reads its output any more. A job is worth more than its output."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
