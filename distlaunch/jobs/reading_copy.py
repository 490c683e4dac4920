"""A run that may only be read, such as another user's, an artifact or one on a read-only mount."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distlaunch.base.run_dir import RunDir


@contextlib.contextmanager
def reading_copy(run: RunDir) -> Iterator[RunDir]:
    """Give a run directory that leads to the files of another, and takes what an attempt writes; it is removed."""
    with tempfile.TemporaryDirectory(prefix="distlaunch-read-") as folder:
        copy = RunDir(Path(folder) / run.name)
        copy.path.mkdir()
        for path in (run.config, run.events, run.environment, run.checkpoints, run.preprocessing("").parent):
            if path.exists():
                (copy.path / path.name).symlink_to(path)
        yield copy
