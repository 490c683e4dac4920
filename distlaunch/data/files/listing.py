"""The files that a path, a glob, a directory or a list of them names, in the same order on all hosts."""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.files.samples import why_unreadable

Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A path, a glob, a directory, or several of them."""

KEY = ("data", "function")
_COMPRESSED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd"}


@dataclass(frozen=True)
class FileSet:
    """Files, sorted by name.

    Attributes:
        paths: absolute.
        sizes: in bytes.
        modified_ns: when each was modified last.
    """

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    modified_ns: tuple[int, ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Return the paths relative to the innermost directory that holds all of them."""
        common = os.path.commonpath([os.path.dirname(path) for path in self.paths])
        return tuple(os.path.relpath(path, common) for path in self.paths)


def mistake(message: str) -> ConfigError:
    """Return an error for a mistake in the user's data function."""
    return ConfigError(Problem(KEY, message))


def find_files(patterns: Patterns, kind: str, suffixes: Sequence[str]) -> FileSet:
    """Find files.

    Args:
        kind: what they should be, for messages: `a CSV file`.
        suffixes: how names end, as globs, of the files to take from a directory.

    Raises:
        ConfigError: a pattern matches nothing, or a file that cannot be read by offset.
    """
    given = [patterns] if isinstance(patterns, (str, os.PathLike)) else list(patterns)
    if not given:
        raise mistake(f"got an empty list of files; expected at least one path, glob or directory of {kind}")
    # a set: patterns may overlap, and a file counts once
    found = {path for pattern in given for path in _expand(os.fspath(pattern), suffixes)}
    # by folder, then by name, in bytes: the same on all hosts
    paths = sorted(found, key=lambda path: os.fsencode(path).split(b"/"))
    for path in paths:
        program = _COMPRESSED.get(os.path.splitext(path)[1])
        if program:
            raise compressed(path, program)
    facts = [_examine(path) for path in paths]
    return FileSet(tuple(paths), tuple(size for size, _ in facts), tuple(modified for _, modified in facts))


def compressed(path: str, program: str) -> ConfigError:
    """Return the error for a compressed file, whose records have no offsets."""
    return mistake(
        f"{path} is compressed, so no example in it can be read without all those before it; decompress it, as with "
        f"'{program}', or convert it to ArrayRecord or Parquet, which compress blocks of examples"
    )


def _expand(pattern: str, suffixes: Sequence[str]) -> list[str]:
    if "://" in pattern:
        raise mistake(f"got '{pattern}'; only files of a file system can be read by offset: mount or copy them")
    path = os.path.abspath(os.path.expanduser(pattern))
    try:
        if os.path.isdir(path):
            return _take_from(path, suffixes)
        if os.path.lexists(path):  # also names with brackets in them
            return [path]
        matches = glob.glob(path, recursive=True) if glob.has_magic(path) else []
    except OSError as error:
        raise mistake(f"'{pattern}' cannot be listed: {error.strerror or error}") from None
    files = [match for match in matches if os.path.isfile(match)]
    if not files:
        missing = "no file matches" if glob.has_magic(path) else "no such file or directory:"
        raise mistake(f"{missing} '{pattern}' (looked for {path})")
    return files


def _take_from(directory: str, suffixes: Sequence[str]) -> list[str]:
    # `_SUCCESS` and the like of Spark are no data
    names = [name for name in os.listdir(directory) if not name.startswith((".", "_"))]
    endings = [*suffixes, *(suffix + end for suffix in suffixes for end in _COMPRESSED)]
    taken = [name for name in names if any(fnmatch.fnmatch(name.lower(), ending) for ending in endings)]
    files = [path for path in (os.path.join(directory, name) for name in taken) if os.path.isfile(path)]
    if not files:
        raise mistake(
            f"the directory {directory} has no file named {' or '.join(suffixes)}; for other names or sub-directories "
            f"give a glob, such as '{os.path.join(directory, '**', suffixes[0])}'"
        )
    return files


def _examine(path: str) -> tuple[int, int]:
    """Return the size in bytes and the time of the last change in ns."""
    try:
        facts = os.stat(path)
    except OSError as error:
        raise mistake(f"{path} cannot be read: {why_unreadable(error)}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise mistake(f"{path} is not a regular file; a record can be read by its offset only in those")
    return facts.st_size, facts.st_mtime_ns
