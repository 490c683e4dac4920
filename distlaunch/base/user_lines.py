"""The line of the user's own code that caused an error."""

from __future__ import annotations

import traceback
from pathlib import Path

_PACKAGES = {"site-packages", "dist-packages", "distlaunch"}


def user_line(error: BaseException) -> str:
    """Return ` (mine.py:12)`, the last line of a traceback outside packages, or an empty string."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _PACKAGES & set(Path(frame.filename).parts)]
    return f" ({_short(Path(own[-1].filename))}:{own[-1].lineno})" if own else ""


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
