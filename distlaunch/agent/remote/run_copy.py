"""The copy of a run directory on a host that does not share the launcher's disk.

Files that tasks write into the copy are sent to the launcher: logs and events while they grow, checkpoints when they
are complete, results of rounds when they are written, and other files when the tasks have ended.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from distlaunch.agent.remote.file_transfer import REMOVE, WRITE, remove_folder, send_file, send_folder
from distlaunch.agent.remote.frames import CHUNK_BYTES, encode
from distlaunch.agent.remote.task_files import is_written_by_tasks
from distlaunch.base.errors import RunBusyError, UsageError
from distlaunch.base.plural import listed
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_lock import Owner, lock_run, owner_in

_MARK = ".copy-of-a-run"
"""File that marks a copy. A folder without it is never emptied. The agent that uses the copy holds its lock."""
_CHECKPOINTS = "checkpoints"
_MAX_NAMED = 5
_Stamp = tuple[int, int, int]
_MISSING: _Stamp = (0, 0, 0)


class CopyInUseError(UsageError):
    """Another agent uses the copy."""


class CopyFolder:
    """The folder of a copy. Until `remove`, or the end of this process, no other agent uses it.

    If an agent has left a copy in which tasks have run, that copy is moved aside: it may have files that were never
    sent to a launcher.

    Args:
        root: the path of the copy, the same as that of the run on the launcher's host.

    Attributes:
        kept: the path to which an earlier copy was moved; None if there was none with files of tasks.

    Raises:
        CopyInUseError: another agent uses the copy.
        UsageError: the folder is not empty and not a copy, or it cannot be created.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kept: Path | None = None
        self._lock = contextlib.ExitStack()
        self._made: list[Path] = []
        """Parent folders that were created, the innermost first."""
        try:
            self._claim()
        except OSError as error:
            self._lock.close()
            advice = "choose another runs_dir, which you may write on this host"
            raise UsageError(f"cannot create {root}: {error.strerror}; {advice}") from None
        except BaseException:
            self._lock.close()
            raise

    def _claim(self) -> None:
        if not (self.root / _MARK).is_file():
            if self.root.exists() and any(self.root.iterdir()):
                raise UsageError(f"{self.root} already exists and belongs to another run; choose another --name")
            self._made = [folder for folder in self.root.parents if not folder.exists()]
        self._make()
        run = RunDir(self.root)
        if any(run.tasks(attempt) for attempt in run.attempts()):
            self.kept = next(path for path in _names_aside(self.root) if not os.path.lexists(path))
            self.root.rename(self.kept)
            (self.kept / _MARK).unlink()
            self._lock.close()
            self._make()
        else:
            for path in self.root.iterdir():
                if path.name != _MARK:
                    remove_folder(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _make(self) -> None:
        """Create the folder, and lock its mark. Raise CopyInUseError if another agent holds it."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = self.root / _MARK
        try:
            self._lock.enter_context(lock_run(mark))
            # another agent may have moved the folder aside before the mark was locked
            is_mine = owner_in(mark) == Owner.here()
        except RunBusyError:
            is_mine = False
        if not is_mine:
            owner = owner_in(mark)
            advice = "wait until its job has ended, or choose another --name"
            raise CopyInUseError(f"another agent ({owner.description}) uses {self.root}; {advice}")

    def remove(self) -> None:
        """Delete the copy. Call this when all files have been sent to the launcher."""
        if (self.root / _MARK).is_file():
            remove_folder(self.root, ignore_errors=True)
        self.close()
        with contextlib.suppress(OSError):  # the folder now contains another run
            for folder in self._made:
                folder.rmdir()

    def close(self) -> None:
        """Let other agents use the copy."""
        self._lock.close()


def _names_aside(root: Path) -> Iterator[Path]:
    return (root.with_name(f"{root.name}.kept-{number}") for number in itertools.count(1))


class RunCopy:
    """The files of a copy during one attempt, and which of them the launcher has.

    Args:
        root: the path of the copy.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tails: dict[str, int] = {}
        self._events: set[str] = set()
        self._rest: dict[str, _Stamp] = {}
        self._checkpoints: dict[str, _Stamp] = {}
        self._unreadable: dict[str, str] = {}
        """Why files could not be read, by name."""

    @property
    def unsent(self) -> str:
        """Return the names of existing files that could not be read, with the reasons; empty if there are none."""
        failed = sorted(self._unreadable.items())
        return listed([f"{name} ({why})" for name, why in failed if os.path.lexists(self.root / name)], _MAX_NAMED)

    def begin(self) -> None:
        """Record the current files as known to the launcher."""
        self._rest = dict(self._others())
        self._checkpoints = dict(self._complete_checkpoints())

    def follow(self, name: str, *, whole_lines: bool = False) -> None:
        """Start to send the data that is appended to a file.

        Args:
            whole_lines: whether to send complete lines only.
        """
        path = self.root / name
        self._tails.setdefault(name, path.stat().st_size if path.exists() else 0)
        if whole_lines:
            self._events.add(name)

    def appended(self) -> Iterator[bytes]:
        """Yield a bounded amount of the data appended to the followed files."""
        for name, offset in self._tails.items():
            try:
                size = os.stat(self.root / name).st_size
                if size <= offset:
                    continue
                with (self.root / name).open("rb") as file:
                    data = os.pread(file.fileno(), CHUNK_BYTES, offset)
            except OSError:  # the file does not exist yet
                continue
            if name in self._events:
                # other hosts append to the same file on the launcher's host, so lines must not be split
                data = data[: data.rfind(b"\n") + 1]
            if data:
                self._tails[name] = offset + len(data)
                yield encode(WRITE, data, path=name)

    def new_checkpoints(self) -> Iterator[bytes]:
        """Yield messages that send new complete checkpoints, newest first, and that remove deleted ones."""
        current = dict(self._complete_checkpoints())
        for name in sorted(current, reverse=True):
            is_new = self._checkpoints.get(name) != current[name]
            if is_new and (yield from self._send(f"{_CHECKPOINTS}/{name}")):
                self._checkpoints[name] = current[name]
        # the launcher keeps its last checkpoint until it has another one
        for name in [name for name in self._checkpoints if name not in current]:
            if self._checkpoints.keys() & current.keys():
                del self._checkpoints[name]
                yield encode(REMOVE, path=f"{_CHECKPOINTS}/{name}")

    def replaced(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield messages that send those of the named files that tasks have written or replaced.

        Args:
            names: names of files that are replaced as a whole, in the order in which tasks write them. They are sent in
                this order, so that a file that arrives is not older than the files before it.
        """
        stamps = {name: _stamp(self.root / name) for name in reversed(names)}
        for name in names:
            if stamps[name] not in (_MISSING, self._rest.get(name)):
                self._rest[name] = stamps[name]
                yield from self._send(name)

    def note_received(self, name: str) -> None:
        """Record that the launcher has sent a file, so that it is not sent back."""
        self._rest[name] = _stamp(self.root / name)

    @property
    def has_new_checkpoints(self) -> bool:
        return dict(self._complete_checkpoints()) != self._checkpoints

    def changed(self) -> Iterator[bytes]:
        """Yield messages that send all other files that tasks have written or changed."""
        left_out = list[str]()
        for name, stamp in list(self._others()):
            if self._rest.get(name) != stamp:
                self._rest[name] = stamp
                if is_written_by_tasks(name):
                    yield from self._send(name)
                else:
                    left_out.append(name)
        if left_out:
            names = listed(sorted(left_out), _MAX_NAMED)
            text = f"not sent because they are code, or files that only a launcher may write: {names}"
            yield encode("line", task="", text=text)

    def _send(self, name: str) -> Generator[bytes, None, bool]:
        """Yield messages that send a file or a folder. If it cannot be read, record that, and return False."""
        path = self.root / name
        try:
            yield from (send_folder if path.is_dir() else send_file)(path, name)
        except OSError as error:
            self._note_unreadable(error, name)
            return False
        self._unreadable.pop(name, None)
        return True

    def _note_unreadable(self, error: OSError, name: str) -> None:
        self._unreadable[name] = error.strerror or str(error)

    def _complete_checkpoints(self) -> Iterator[tuple[str, _Stamp]]:
        folder = self.root / _CHECKPOINTS
        try:
            names = os.listdir(folder)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._note_unreadable(error, _CHECKPOINTS)
            return
        for name in names:
            if not name.startswith("."):
                yield name, _stamp(folder / name)

    def _others(self) -> Iterator[tuple[str, _Stamp]]:
        def note(error: OSError) -> None:
            self._note_unreadable(error, Path(error.filename).relative_to(self.root).as_posix())

        for folder, folders, names in os.walk(self.root, onerror=note):
            here = Path(folder).relative_to(self.root).as_posix()
            for name in folders:
                if os.path.islink(os.path.join(folder, name)):
                    self._unreadable[f"{here}/{name}".removeprefix("./")] = "is a link to a folder"
            folders[:] = [name for name in folders if not name.startswith(".") and (here, name) != (".", _CHECKPOINTS)]
            for name in names:
                path = name if here == "." else f"{here}/{name}"
                # heartbeats are sent in messages
                if not name.startswith(".") and name != "heartbeat" and path not in self._tails:
                    yield path, _stamp(Path(folder, name))


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:  # the file has just been deleted
        return _MISSING
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_shared(root: Path, nonce: str) -> bool:
    """Return True if the launcher's run directory is visible on this host.

    Args:
        nonce: the name of a file that the launcher has just created in the directory.
    """
    try:
        return (root / nonce).is_file()
    except OSError:  # a folder that this user may not enter
        return False
