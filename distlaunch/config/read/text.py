"""Reads a config file as text, and explains why a file cannot be read as a config."""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.read.words import closest, listed

MAX_BYTES = 1 << 20  # a checkpoint given as config by mistake must not fill the memory
_FOREIGN_MARKS = {
    # test UTF-32 before UTF-16, since its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


_OPEN_FILES = ("/dev/stdin", "/dev/fd/", "/proc/")
"""Beginnings of paths of files that this process has open, whatever kind of file it is."""

_STREAMS: dict[str, tuple[tuple[int, int], bytes]] = {}
"""Device, inode and content of each pipe that this process has read, by its path. A pipe can be read only once."""


def is_stream(path: Path) -> bool:
    """Return True for `-`, a device, a FIFO or a pipe of the shell, whose name and folder mean nothing."""
    if str(path) == "-" or str(path.absolute()).startswith(_OPEN_FILES):
        return True
    with contextlib.suppress(OSError, ValueError):
        mode = path.stat().st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)
    return False


def folder_of(path: Path) -> Path:
    """Return the folder from which a config's relative paths start: its own, or the current one for a stream."""
    return Path() if is_stream(path) else path.parent


def readable_again(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of this command for a program that replaces it and cannot read a pipe again.

    The bytes of each stream that was read are put in a file in memory, which the other program inherits.
    """
    return [f"/dev/fd/{_in_memory(_STREAMS[each][1])}" if each in _STREAMS else each for each in arguments]


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("config", 0)
    os.write(fd, data)
    return fd


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: the file does not exist, cannot be read, is a folder, is too large, or is not text in UTF-8.
    """
    data = _read_bytes(path)
    if len(data) > MAX_BYTES:
        raise _error(path, "larger than 1 MiB; expected a config of a few kilobytes. Is this the right file?")
    for mark, encoding in _FOREIGN_MARKS.items():
        if data.startswith(mark):
            raise _error(path, f"the file is {encoding}; save it as UTF-8")
    line = _line_of_nul(data)
    if line is not None:
        raise _error(path, "a NUL byte; expected plain text. Is this a binary file, or UTF-16 without a mark?", line)
    try:
        # Windows editors may write a byte order mark before UTF-8
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _error(path, f"not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8", line) from None
    return text


def _read_bytes(path: Path) -> bytes:
    try:
        if not is_stream(path):
            with path.open("rb") as file:
                # read one more byte, to detect a larger file
                return file.read(MAX_BYTES + 1)
        found = os.fstat(0) if str(path) == "-" else path.stat()
        identity, data = _STREAMS.get(str(path), (None, b""))
        if identity != (found.st_dev, found.st_ino):
            with open(0, "rb", closefd=False) if str(path) == "-" else path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            _STREAMS[str(path)] = (found.st_dev, found.st_ino), data
        return data
    except FileNotFoundError:
        raise _missing(path) from None
    except IsADirectoryError:
        found = _configs_in(path)
        hint = f"; it contains {listed(found, 5)}" if found else ""
        raise _error(path, f"this is a folder; expected a YAML file{hint}") from None
    except NotADirectoryError:
        raise _error(path, "no such file: a part of the path is a file, not a folder") from None
    except PermissionError:
        raise _error(path, f"permission denied; to allow yourself to read the file: chmod u+r {path}") from None
    except (OSError, ValueError) as error:
        raise _error(path, f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _missing(path: Path) -> ConfigError:
    folder = path.parent
    if not folder.is_dir():
        return _error(path, f"no such file, and no folder {folder}")
    names = _configs_in(folder)
    stems = {name.rpartition(".")[0]: name for name in names}
    close = closest(path.stem, stems)
    hint = f"; did you mean '{stems[close]}'?" if close else ""
    if not hint:
        hint = f"; the folder contains {listed(names, 5)}" if names else "; `distlaunch init` writes one to start from"
    return _error(path, f"no such file{hint}")


def _configs_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"})
    except OSError:
        return []


def _line_of_nul(data: bytes) -> int | None:
    index = data.find(b"\0")
    return None if index < 0 else data.count(b"\n", 0, index) + 1


def _error(path: Path, message: str, line: int | None = None) -> ConfigError:
    return ConfigError(Problem((), message, f"{path}:{line}" if line else str(path)))
