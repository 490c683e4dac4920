"""The code of a job: its files, their digests, and the messages that send them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from distlaunch.agent.remote.code_copy import digest_of
from distlaunch.agent.remote.file_transfer import send_file
from distlaunch.agent.remote.frames import MAX_PAYLOAD_BYTES
from distlaunch.base.errors import UsageError

_MOST = 10_000
"""Files, and folders that are searched."""
_MOST_BYTES = 500_000_000
_PASSED_OVER = ("node_modules", "site-packages", "__pycache__", "runs")


class CodeFiles:
    """The files of a folder. Where git knows the folder: those that it knows or would add. Else: all but hidden ones,
    environments, and runs.

    Args:
        files: Python files that the config names; they may be elsewhere.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder = folder
        self._outside = [name for name in files if not Path(name).is_relative_to(folder)]

    @functools.cached_property
    def _names(self) -> list[str]:
        found = [*islice(_git_files(self._folder), _MOST)] or [*islice(_walked(self._folder), _MOST)]
        return [name for name in found if (self._folder / name).is_file()]

    def digests_as_json(self, *, outside: bool) -> bytes:
        """Of Python files, by their names in the folder.

        Args:
            outside: also of those that are elsewhere.
        """
        names = [name for name in self._names if name.endswith(".py")]
        # within the folder by their names there, elsewhere by their paths
        names += [*self._outside] if outside else []
        return self._listed(names)

    def listing(self) -> bytes:
        """All files with what they hold. Raises UsageError if that is too much to be code."""
        size = sum((self._folder / name).stat().st_size for name in self._names)
        if size > _MOST_BYTES:
            raise UsageError(f"engine.sync: code: the files of {self._folder} have {size:,} bytes, and {_MOST_BYTES:,} "
                             "at most are sent; let git ignore data, or use `sync: none`")  # fmt: skip
        if self._outside:
            raise UsageError(f"engine.sync: code: {self._outside[0]} is not in {self._folder}, which is what is sent; "
                             "start the command in a folder that holds it")  # fmt: skip
        return self._listed(self._names)

    def _listed(self, names: Sequence[str]) -> bytes:
        data = json.dumps({name: digest_of(self._folder / name) for name in names}).encode()
        if len(data) > MAX_PAYLOAD_BYTES:
            raise UsageError(f"{self._folder} has {len(names):,} files, too many to compare with those of other hosts; "
                             "start the command in the folder of your code")  # fmt: skip
        return data

    def messages(self) -> Iterator[bytes]:
        """The messages that send all files."""
        for name in self._names:
            yield from send_file(self._folder / name, name)


def _git_files(folder: Path) -> Iterator[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
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
        yield from (str((path / name).relative_to(folder)) for name in sorted(names) if not name.startswith("."))
