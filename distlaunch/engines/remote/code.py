"""The code of a job: its files, their digests, and the messages that send them."""

from __future__ import annotations

import fnmatch
import functools
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from distlaunch.agent.remote.code_copy import digest_of
from distlaunch.agent.remote.file_transfer import send_file
from distlaunch.agent.remote.frames import MAX_PAYLOAD_BYTES
from distlaunch.base.errors import UsageError
from distlaunch.base.git import git_output, is_unreadable

_MAX_FILES = 10_000
"""Limit on the number of files, and of folders that are searched."""
_MAX_BYTES = 500_000_000
_SKIPPED_FOLDERS = ("node_modules", "site-packages", "__pycache__", "runs")
_SECRET_NAMES = ("id_*", "*.pem", "*.key", "*.p12", "*.pfx", "credentials", "credentials.json")
"""Names of files, other than hidden ones, that usually hold keys and passwords."""


class CodeFiles:
    """The files of a folder that are sent to hosts.

    In a git repository, these are the files that git tracks or would add. Elsewhere, these are all files except virtual
    environments. Runs are skipped, and unless git tracks them, also hidden files and files that look like secrets.

    Args:
        files: Python files that the config names, perhaps outside the folder.
        more: additional files to send, even if they are hidden or look like secrets.
    """

    def __init__(self, folder: Path, files: Sequence[str], more: Sequence[str] = ()) -> None:
        self._folder, self._more = folder, more
        self._outside = [name for name in files if not Path(name).is_relative_to(folder)]
        self._named = [str(Path(name).relative_to(folder)) for name in files if name not in self._outside]

    @functools.cached_property
    def _candidates(self) -> tuple[list[str], list[str]]:
        """Return the files that git tracks, and others that may be code."""
        tracked, others = _git_files(self._folder)
        # one file more than the limit, so that it is noticed
        return tracked, others if tracked or others else [*islice(_walk(self._folder), _MAX_FILES + 1)]

    @functools.cached_property
    def _names(self) -> list[str]:
        tracked, others = self._candidates
        sent = [*tracked, *(name for name in others if not _kept_here(name))]
        sent += [name for link in tracked for name in self._names_below_link(link, tracked)]
        found = [name for name in sent if (self._folder / name).is_file() and not self._belongs_to_run(name)]
        return sorted({*found, *self._named, *self._more})

    def _names_below_link(self, name: str, tracked: Sequence[str]) -> Iterator[str]:
        """Yield the files below a link to a folder with tracked files; git tracks the link itself only."""
        path, folder = self._folder / name, self._folder.resolve()
        # links to folders elsewhere usually lead to data
        if path.is_symlink() and path.is_dir() and path.resolve().is_relative_to(folder):
            below = f"{path.resolve().relative_to(folder)}/"
            yield from (f"{name}/{other.removeprefix(below)}" for other in tracked if other.startswith(below))

    @functools.cached_property
    def left_out(self) -> list[str]:
        """Return the hidden files and folders, and the files that look like secrets, that are not sent."""
        names = [
            kept
            for name in self._candidates[1]
            if (kept := _kept_here(name)) and not self._belongs_to_run(name) and name not in self._more
        ]
        # no task reads this one, so it is not worth a message
        return [kept for kept in dict.fromkeys(names) if Path(kept).name != ".gitignore"]

    def _belongs_to_run(self, name: str) -> bool:
        """Return True if a file is in the directory of a run."""
        return any(_is_run(self._folder / parent) for parent in Path(name).parents if parent.name)

    def _check_inside(self, name: str) -> None:
        """Raise UsageError for a link to a file outside the folder."""
        path = self._folder / name
        if not path.is_file():
            raise UsageError(f"engine.sync_files: there is no file {path}")
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise UsageError(f"engine.sync: code: {name} is a link to {path.resolve()}, outside {self._folder}; "
                             "replace it by a copy, or let git ignore it")  # fmt: skip

    def digests_as_json(self, *, outside: bool) -> bytes:
        """Return the digests of Python files, by their names in the folder.

        Args:
            outside: whether to include files outside the folder.
        """
        names = [name for name in self._names if name.endswith(".py")]
        # files in the folder have relative names, others have absolute paths
        names += [*self._outside] if outside else []
        return self._listed(names)

    def listing(self) -> bytes:
        """Return the names and digests of all files.

        Raises:
            UsageError: git cannot say which files are code, there are too many files, they are too large to be code,
                or code of the config is outside of the folder.
        """
        if not self._candidates[0] and is_unreadable(self._folder):
            raise UsageError(f"engine.sync: code: git cannot read the repository of {self._folder}, and so cannot say "
                             "which files to send; `git status` there says why")  # fmt: skip
        if len(self._names) > _MAX_FILES:
            raise UsageError(f"engine.sync: code: {self._folder} has {len(self._names):,} files; the limit is "
                             f"{_MAX_FILES:,}; let git ignore data, or use `sync: none`")  # fmt: skip
        for name in self._names:
            self._check_inside(name)
        size = sum((self._folder / name).stat().st_size for name in self._names)
        if size > _MAX_BYTES:
            raise UsageError(f"engine.sync: code: the files of {self._folder} have {size:,} bytes; the limit is "
                             f"{_MAX_BYTES:,}; let git ignore data, or use `sync: none`")  # fmt: skip
        if self._outside:
            raise UsageError(f"engine.sync: code: {self._outside[0]} is outside of {self._folder}, the folder that is "
                             "sent; start the command in a folder that contains both")  # fmt: skip
        return self._listed(self._names)

    def _listed(self, names: Sequence[str]) -> bytes:
        data = json.dumps({name: digest_of(self._folder / name) for name in names}).encode()
        if len(data) > MAX_PAYLOAD_BYTES:
            raise UsageError(f"{self._folder} has {len(names):,} files, too many to compare with those of other hosts; "
                             "start the command in the folder of your code")  # fmt: skip
        return data

    def messages(self) -> Iterator[bytes]:
        """Yield the messages that send all files."""
        for name in self._names:
            yield from send_file(self._folder / name, name, keeps_mode=True)


def _kept_here(name: str) -> str:
    """Return the part of a path because of which a file is not sent: a hidden folder, or the whole path of a file.

    Empty for a file that is neither hidden nor looks like a secret.
    """
    parts = Path(name).parts
    for number, part in enumerate(parts, 1):
        if part.startswith("."):
            return name if number == len(parts) else f"{Path(*parts[:number])}/"
    return name if any(fnmatch.fnmatch(parts[-1], pattern) for pattern in _SECRET_NAMES) else ""


@functools.cache
def _is_run(folder: Path) -> bool:
    """Return True for the directory of a run."""
    return (folder / "attempts").is_dir() and (folder / "events.jsonl").exists()


def _git_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files that git tracks or would add; none outside a repository."""
    tracked = _listed_by_git(folder, "--cached", "--recurse-submodules")
    return tracked, _listed_by_git(folder, "--others", "--exclude-standard")


def _listed_by_git(folder: Path, *options: str) -> list[str]:
    found = git_output(folder, "ls-files", *options, "-z") or b""
    return sorted(name for name in found.decode(errors="surrogateescape").split("\0") if name)


def _walk(folder: Path) -> Iterator[str]:
    for here, folders, names in islice(os.walk(folder), _MAX_FILES):
        path = Path(here)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED_FOLDERS and not (path / name / "pyvenv.cfg").exists()
        )
        yield from (str((path / name).relative_to(folder)) for name in sorted(names) if not name.startswith("."))
