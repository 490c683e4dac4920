"""Paths as users like to read them."""

from __future__ import annotations

from pathlib import Path


def shown(path: Path | str) -> str:
    """Return the path, relative if it is below the current directory."""
    text = str(path)
    prefix = str(Path.cwd()).rstrip("/") + "/"
    return text.removeprefix(prefix)
