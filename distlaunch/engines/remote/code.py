"""The code of a job: which files it is, and what they hold."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from distlaunch.agent.remote.service import digest_of

_MOST = 10_000
"""Files, and folders that are searched."""
_PASSED_OVER = ("node_modules", "site-packages", "__pycache__")


def code_digests(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Of the Python files in a folder, by their names there, and of some others.

    Where git knows the folder: of those that it knows or would add. Else: of all, but for hidden folders and
    environments.
    """
    names = [*islice(_git_files(folder), _MOST)] or [*_walked(folder)]
    outside = [name for name in files if not Path(name).is_relative_to(folder)]
    return {name: digest for name in [*names, *outside] if (digest := digest_of(folder / name))}


def _git_files(folder: Path) -> Iterator[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "*.py"]
    try:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return
    yield from sorted(name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name)


def _walked(folder: Path) -> Iterator[str]:
    for here, folders, names in islice(os.walk(folder), _MOST):
        path = Path(here)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _PASSED_OVER and not (path / name / "pyvenv.cfg").exists()
        )
        yield from (str((path / name).relative_to(folder)) for name in sorted(names) if name.endswith(".py"))
