"""Sends and receives files of a run directory, as messages that write, move or remove a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from distlaunch.agent.remote.frames import CHUNK_BYTES, Frame, FrameError, encode
from distlaunch.base.folders import make_folder
from distlaunch.base.regular_files import open_regular

WRITE, MOVE, REMOVE = "write", "move", "remove"
KINDS = (WRITE, MOVE, REMOVE)
_PART = ".part.tmp"


def below(root: Path, name: str) -> Path:
    """Return the path of a file that another host has named. Raise FrameError if it is outside of `root`."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise FrameError(f"got the file name {name!r:.80}; expected one inside the run directory")
    return root.joinpath(*parts)


class Incoming:
    """Writes the files that another host sends into a folder.

    Args:
        limit_of: maps the name of a file to its maximum size in bytes; None for no limit.

    Attributes:
        problem: why a file could not be written; empty if all files were written.
    """

    def __init__(self, root: Path, limit_of: Callable[[str], int] | None = None) -> None:
        self._root, self._limit_of = root, limit_of
        self.problem = ""
        self._incomplete: set[str] = set()
        """Files that could not be written completely."""

    def take(self, frame: Frame) -> None:
        """Handle a message. Record an error of the disk in `problem`; raise FrameError for an invalid message."""
        path = frame.text("path")
        part = part_of(path)
        if path == part and (frame.kind == REMOVE or frame.fields.get("fresh")):
            self._incomplete.discard(part)
        # an incomplete file or checkpoint must not be moved into place
        if part in self._incomplete:
            return
        try:
            receive(self._root, frame, None if self._limit_of is None else self._limit_of(path))
        except OSError as error:
            self.problem = self.problem or f"{path} cannot be written: {error.strerror}"
            if part:
                self._incomplete.add(part)


def remove_folder(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder with its contents. Raise OSError if that fails, unless `ignore_errors` is set."""
    import shutil  # imported here: it takes 2 ms, and most agents remove nothing

    shutil.rmtree(path, ignore_errors=ignore_errors)


def receive(root: Path, frame: Frame, limit: int | None = None) -> None:
    """Carry out a message. Raise OSError if that fails, or FrameError if the message is invalid.

    Args:
        limit: maximum size of the file in bytes; None for no limit.
    """
    path = below(root, frame.text("path"))
    if frame.kind == REMOVE:
        remove_folder(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    elif frame.kind == MOVE:
        _move(path, below(root, frame.text("to")))
    else:
        make_folder(path.parent)
        how = os.O_TRUNC if frame.fields.get("fresh") else os.O_APPEND
        # do not follow links, which may lead outside the folder, and do not block on a pipe
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags | how, 0o666), "wb", buffering=0) as file:
            if limit is not None and os.fstat(file.fileno()).st_size + len(frame.payload) > limit:
                raise OSError(errno.EFBIG, f"longer than {limit:,} bytes", str(path))
            if isinstance(mode := frame.fields.get("mode"), int):
                os.fchmod(file.fileno(), mode & 0o700)
            left = memoryview(frame.payload)
            while left:  # a nearly full disk takes only a part of the data; the next write then fails
                left = left[file.write(left) or 0 :]


def _move(path: Path, to: Path) -> None:
    make_folder(to.parent)
    if not path.is_dir() or not to.exists():
        path.replace(to)
        return
    # a folder cannot be renamed over a folder that is not empty
    before = to.with_name(f".{to.name}.before.tmp")
    remove_folder(before, ignore_errors=True)
    to.rename(before)
    path.rename(to)
    remove_folder(before)


def send_file(path: Path, name: str, *, keeps_mode: bool = False) -> Iterator[bytes]:
    """Yield messages that write a file under this name atomically. Raise OSError if the file cannot be read.

    Args:
        keeps_mode: whether to keep the owner's permissions and remove those of others.
    """
    part = _part(name)
    with open_regular(path) as file:
        facts = {"mode": os.fstat(file.fileno()).st_mode & 0o700} if keeps_mode else {}
        yield from _chunks(file.fileno(), part, **facts)
    yield encode(MOVE, path=part, to=name)


def send_folder(path: Path, name: str) -> Iterator[bytes]:
    """Yield messages that write a folder under this name atomically.

    All files are opened first, so that the folder is sent completely even if it is deleted in the meantime.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file())
    fds: list[int] = []
    part = _part(name)
    try:
        fds.extend(os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files)
        yield encode(REMOVE, path=part)
        for fd, file in zip(fds, files, strict=True):
            yield from _chunks(fd, f"{part}/{file.relative_to(path).as_posix()}")
        yield encode(MOVE, path=part, to=name)
    finally:
        for fd in fds:
            os.close(fd)


def _part(name: str) -> str:
    """Return the name of a file while it is incomplete."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/.{last}{_PART}" if folder else f".{last}{_PART}"


def part_of(name: str) -> str:
    """Return the incomplete file or folder that contains a name, or an empty string."""
    words = name.split("/")
    ends = [number for number, word in enumerate(words, 1) if word.endswith(_PART)]
    return "/".join(words[: ends[0]]) if ends else ""


def _chunks(fd: int, name: str, **facts: int) -> Iterator[bytes]:
    fresh, offset = True, 0
    while (data := os.pread(fd, CHUNK_BYTES, offset)) or fresh:
        yield encode(WRITE, data, path=name, fresh=fresh, **(facts if fresh else {}))
        fresh, offset = False, offset + len(data)
