"""Paths in messages to users."""

from __future__ import annotations

from pathlib import Path

RUNS_DIR = "runs"
"""The folder in which runs are looked for: the default of `runs_dir` in configs."""


def display_path(path: Path | str) -> str:
    """Return the path, relative if it is below the current directory."""
    text = str(path)
    prefix = str(Path.cwd()).rstrip("/") + "/"
    return text.removeprefix(prefix)
