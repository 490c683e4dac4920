"""The user's cache, where what takes long to find out is kept over runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(kind: str) -> Path | None:
    """Return the folder for a kind of things; None where the user has no home. It may not exist yet."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # others are to be ignored, says the standard
        return Path(given, "distlaunch", kind)
    home = os.path.expanduser("~")
    return Path(home, ".cache", "distlaunch", kind) if os.path.isabs(home) else None
