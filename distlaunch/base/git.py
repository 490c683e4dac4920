"""The commit and the changes of the user's code, for records."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from distlaunch.base.secret_mask import SecretMask

GIT = ("git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
"""git with options that keep it from running programs named in the repository's settings."""
_MAX_DIFF = 200_000
"""Number of characters of the changes that are recorded."""
_TIMEOUT_S = 2.0


def describe_code(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the commit of a repository, and the changes to tracked files since; None if the folder is in none.

    Args:
        folder: a folder in the repository.
        environ: environment variables, whose secrets are masked in the changes.
    """
    if (commit := _git(folder, "rev-parse", "HEAD")) is None:
        return None
    changes = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or ""
    if len(changes) > _MAX_DIFF:
        changes = f"{changes[:_MAX_DIFF]}\n... {len(changes) - _MAX_DIFF:,} more characters\n"
    return {"commit": commit.strip(), "diff": SecretMask(environ).whole(changes)}


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of a git command, or None if it fails."""
    try:
        done = subprocess.run(
            [*GIT, "-C", str(folder), *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
