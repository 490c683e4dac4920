"""The console that everything is printed with."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from rich.console import Console

_UNBROKEN = 100_000  # columns


class JobConsole(Console):
    """Rich ends the process when nobody reads its output any more. A job is worth more than its output.

    In a file or a pipe, where rich assumes 80 columns, lines are not broken: they are searched, and commands copied.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal and options.get("width") is None and "COLUMNS" not in os.environ:
            self.width = _UNBROKEN

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
