"""The commit and the changes of the user's code, for records."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from distlaunch.base.secret_mask import SecretMask

_GIT = ("git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
"""git with options that keep it from running programs named in the repository's settings."""
_MAX_DIFF = 200_000
"""Maximum number of characters of the changes that are recorded."""
_TIMEOUT_S = 2.0


def describe_code(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the current commit of a repository and the uncommitted changes; None if the folder is in no repository.

    Args:
        folder: a folder in the repository.
        environ: environment variables, whose secrets are masked in the changes.
    """
    commit = git_output(folder, "rev-parse", "HEAD", timeout_s=_TIMEOUT_S)
    if commit is None:
        return None
    options = ("--no-ext-diff", "--no-textconv", "--no-color")
    changes = (git_output(folder, "diff", *options, "HEAD", timeout_s=_TIMEOUT_S) or b"").decode(errors="replace")
    if len(changes) > _MAX_DIFF:
        changes = f"{changes[:_MAX_DIFF]}\n... {len(changes) - _MAX_DIFF:,} more characters\n"
    return {"commit": commit.decode().strip(), "diff": SecretMask(environ).whole(changes)}


def is_unreadable(folder: Path) -> bool:
    """Return whether a folder is in a repository that git cannot read, for example since another user owns it.

    False if git is not installed.
    """
    marks = ((each / ".git") for each in (folder, *folder.absolute().parents))
    # a file in submodules and worktrees
    has_repository = any(mark.is_file() or (mark / "HEAD").exists() for mark in marks)
    return has_repository and shutil.which("git") is not None and git_output(folder, "rev-parse", "--git-dir") is None


def git_output(folder: Path, *words: str, timeout_s: float | None = None) -> bytes | None:
    """Return the output of a git command in a folder; None if it fails, for example since there is no repository."""
    command = [*_GIT, *words]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=timeout_s, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
