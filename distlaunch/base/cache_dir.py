"""The user's cache directory, which keeps results of slow computations for later runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(kind: str) -> Path | None:
    """Return the folder for a kind of cached data, or None if the user has no home. The folder may not exist yet."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG standard says to ignore relative paths
        return Path(given, "distlaunch", kind)
    home = os.path.expanduser("~")
    return Path(home, ".cache", "distlaunch", kind) if os.path.isabs(home) else None
