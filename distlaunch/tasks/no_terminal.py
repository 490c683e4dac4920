"""Replaces the terminal, which a task does not have: a prompt raises an error that names the alternative."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from distlaunch.base.code_origins import PREFIX, origins
from distlaunch.base.errors import DistlaunchError

_OTHERS = tuple(
    f"{folder}/" for folder in (Path(__file__).parents[1], *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)
_LOCAL = ("", "pdb.set_trace")
"""Values of PYTHONBREAKPOINT that open a prompt in the terminal. Other values are `0`, or name another debugger."""


class NoTerminalError(DistlaunchError):
    """The user's code asked for input in a task."""


def refuse_input() -> None:
    """Make `breakpoint()` and reading from standard input raise NoTerminalError."""
    # `input()` reads from `sys.stdin` if that is not a file
    sys.stdin = _NoInput()
    sys.breakpointhook = _breakpoint


def asks_in_terminal() -> bool:
    """Return whether `breakpoint()` would open Python's own prompt."""
    return os.environ.get("PYTHONBREAKPOINT", "") in _LOCAL


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    if asks_in_terminal():
        _refuse("breakpoint()")
    return sys.__breakpointhook__(*args, **kwargs)


class _NoInput(io.TextIOBase):
    """Replacement of standard input that raises NoTerminalError."""

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse("standard input (as a debugger reads it)")

    def read(self, size: int | None = -1) -> NoReturn:
        _refuse("standard input")


def _refuse(what: str) -> NoReturn:
    raise NoTerminalError(
        f"{_place()}{what}: a task has no terminal; `distlaunch train --debug CONFIG` runs the config in one process "
        "with a terminal"
    )


def _place() -> str:
    """Return the file and line of the user's code that asked for input, as a prefix of a message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if origin := origins.get((file, line)):
            return f"{origin.file}:{origin.line}: "
        if not file.startswith((*_OTHERS, "<", PREFIX)):
            return f"{file}:{line}: "
        frame = frame.f_back
    return ""
