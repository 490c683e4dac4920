"""The run directory on this host: the controller's own where the disk is shared, else a copy of what tasks need.

What tasks write into a copy is sent to the controller. Logs and events are followed, a checkpoint is sent when it is
complete, and everything else when the tasks have ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from distlaunch.agent.remote.file_transfer import REMOVE, WRITE, remove_folder, send_file, send_folder
from distlaunch.agent.remote.frames import CHUNK_BYTES, encode
from distlaunch.agent.remote.task_files import is_of_tasks
from distlaunch.base.errors import UsageError

_MARK = ".copy-of-a-run"
"""Only a folder with this file is ever emptied."""
_CHECKPOINTS = "checkpoints"
_NAMED = 5
_Stamp = tuple[int, int, int]


class RunCopy:
    """The copy of one run directory.

    Args:
        root: where it is, the same path as on the controller's host.
        is_first: nothing of this run has been put there by this agent; what an earlier one has left is removed.

    Raises:
        UsageError: there is something else.
    """

    def __init__(self, root: Path, *, is_first: bool) -> None:
        self.root = root
        self._made: list[Path] = []
        """Folders around it that were not there before, the innermost first."""
        if is_first:
            self._make()
        self._tails: dict[str, int] = {}
        self._events: set[str] = set()
        self._rest: dict[str, _Stamp] = {}
        self._checkpoints: dict[str, _Stamp] = {}

    def _make(self) -> None:
        if (self.root / _MARK).is_file():
            remove_folder(self.root)
        elif self.root.exists() and any(self.root.iterdir()):
            raise UsageError(f"{self.root} is there already and belongs to another run; choose another --name")
        self._made = [folder for folder in self.root.parents if not folder.exists()]
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.root / _MARK).touch()
        except OSError as error:
            raise UsageError(f"cannot make {self.root}: {error.strerror}; choose another runs_dir") from None

    def begin(self) -> None:
        """Record the present files as known to the controller."""
        self._rest = dict(self._others())
        self._checkpoints = dict(self._complete_checkpoints())

    def follow(self, name: str, *, whole_lines: bool = False) -> None:
        """Start to send what is appended to a file."""
        path = self.root / name
        self._tails.setdefault(name, path.stat().st_size if path.exists() else 0)
        if whole_lines:
            self._events.add(name)

    def appended(self) -> Iterator[bytes]:
        """Return a bounded part of what was appended to the followed files."""
        for name, offset in self._tails.items():
            try:
                size = os.stat(self.root / name).st_size
                if size <= offset:
                    continue
                with (self.root / name).open("rb") as file:
                    data = os.pread(file.fileno(), CHUNK_BYTES, offset)
            except OSError:  # not there yet
                continue
            if name in self._events:
                # others append to the controller's file as well: half a line must not come between theirs
                data = data[: data.rfind(b"\n") + 1]
            if data:
                self._tails[name] = offset + len(data)
                yield encode(WRITE, data, path=name)

    def new_checkpoints(self) -> Iterator[bytes]:
        """Return complete checkpoints that were not sent yet, newest first, and those that were deleted."""
        there = dict(self._complete_checkpoints())
        for name in sorted(there, reverse=True):
            if self._checkpoints.get(name) != there[name]:
                yield from send_folder(self.root / _CHECKPOINTS / name, f"{_CHECKPOINTS}/{name}")
                self._checkpoints[name] = there[name]
        # one that stands for the run stays until the controller has another
        for name in [name for name in self._checkpoints if name not in there]:
            if self._checkpoints.keys() & there.keys():
                del self._checkpoints[name]
                yield encode(REMOVE, path=f"{_CHECKPOINTS}/{name}")

    @property
    def has_new_checkpoints(self) -> bool:
        return dict(self._complete_checkpoints()) != self._checkpoints

    def changed(self) -> Iterator[bytes]:
        """Return all other files that tasks have written or changed."""
        left_out = list[str]()
        for name, stamp in list(self._others()):
            if self._rest.get(name) != stamp:
                self._rest[name] = stamp
                if is_of_tasks(name):
                    yield from send_file(self.root / name, name)
                else:
                    left_out.append(name)
        if left_out:
            names = ", ".join(sorted(left_out)[:_NAMED]) + (", ..." if left_out[_NAMED:] else "")
            text = f"not sent, since only a launcher writes such files, or since they are code: {names}"
            yield encode("line", task="", text=text)

    def remove(self) -> None:
        """Delete the copy; the controller has everything."""
        if (self.root / _MARK).is_file():
            remove_folder(self.root, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run is in it by now
            for folder in self._made:
                folder.rmdir()

    def _complete_checkpoints(self) -> Iterator[tuple[str, _Stamp]]:
        folder = self.root / _CHECKPOINTS
        for path in folder.iterdir() if folder.is_dir() else ():
            if not path.name.startswith("."):
                yield path.name, _stamp(path)

    def _others(self) -> Iterator[tuple[str, _Stamp]]:
        for folder, folders, names in os.walk(self.root):
            here = Path(folder).relative_to(self.root).as_posix()
            folders[:] = [name for name in folders if not name.startswith(".") and (here, name) != (".", _CHECKPOINTS)]
            for name in names:
                path = name if here == "." else f"{here}/{name}"
                # signs of life are sent by themselves
                if not name.startswith(".") and name != "heartbeat" and path not in self._tails:
                    yield path, _stamp(Path(folder, name))


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:  # just deleted
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_shared(root: Path, nonce: str) -> bool:
    """Return True if the controller's run directory is visible here: it has put a file of this name there."""
    return (root / nonce).is_file()
