"""Finds the files of a path, a glob, a directory or a list of them, in the same order on all hosts."""

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
        paths: absolute paths.
        sizes: sizes in bytes.
        modified_ns: time of the last modification of each file.
    """

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    modified_ns: tuple[int, ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Return the paths relative to the innermost directory that holds all of them."""
        common = os.path.commonpath([os.path.dirname(path) for path in self.paths])
        return tuple(os.path.relpath(path, common) for path in self.paths)


def data_function_error(message: str) -> ConfigError:
    """Return an error for a mistake in the user's data function."""
    return ConfigError(Problem(KEY, message))


def find_files(patterns: Patterns, kind: str, suffixes: Sequence[str]) -> FileSet:
    """Return the files that patterns match, sorted by folder and name.

    Args:
        kind: word for the expected files in messages, such as `a CSV file`.
        suffixes: globs for the names of files that are read from a directory.

    Raises:
        ConfigError: a pattern matches no file, or a file that cannot be read by offset.
    """
    given = [patterns] if isinstance(patterns, (str, os.PathLike)) else list(patterns)
    if not given:
        raise data_function_error(
            f"got an empty list of files; expected at least one path, glob or directory of {kind}"
        )
    # a set, because patterns may overlap
    found = {path for pattern in given for path in _expand(os.fspath(pattern), suffixes)}
    # by folder and name, as bytes, so that the order is the same on all hosts
    paths = sorted(found, key=lambda path: os.fsencode(path).split(b"/"))
    for path in paths:
        program = _COMPRESSED.get(os.path.splitext(path)[1])
        if program:
            raise compressed_file_error(path, program)
    facts = [_examine(path) for path in paths]
    return FileSet(tuple(paths), tuple(size for size, _ in facts), tuple(modified for _, modified in facts))


def compressed_file_error(path: str, program: str) -> ConfigError:
    """Return the error for a compressed file, whose records have no offsets."""
    return data_function_error(
        f"{path} is compressed as a whole, so its examples cannot be read in any order; decompress it, for instance "
        f"with '{program}', or convert it to ArrayRecord or Parquet, which compress blocks of examples"
    )


def _expand(pattern: str, suffixes: Sequence[str]) -> list[str]:
    if "://" in pattern:
        raise data_function_error(f"got '{pattern}'; expected files in a file system; mount or copy these")
    path = os.path.abspath(os.path.expanduser(pattern))
    try:
        if os.path.isdir(path):
            return _list_directory(path, suffixes)
        if os.path.lexists(path):  # before globs, because a file's name may contain brackets
            return [path]
        matches = glob.glob(path, recursive=True) if glob.has_magic(path) else []
    except OSError as error:
        raise data_function_error(f"'{pattern}' cannot be listed: {error.strerror or error}") from None
    files = [match for match in matches if os.path.isfile(match)]
    if not files:
        missing = "no file matches" if glob.has_magic(path) else "no such file or directory:"
        raise data_function_error(f"{missing} '{pattern}' (looked for {path})")
    return files


def _list_directory(directory: str, suffixes: Sequence[str]) -> list[str]:
    # Spark writes files such as `_SUCCESS`, which are not data
    names = [name for name in os.listdir(directory) if not name.startswith((".", "_"))]
    endings = [*suffixes, *(suffix + end for suffix in suffixes for end in _COMPRESSED)]
    taken = [name for name in names if any(fnmatch.fnmatch(name.lower(), ending) for ending in endings)]
    files = [path for path in (os.path.join(directory, name) for name in taken) if os.path.isfile(path)]
    if not files:
        raise data_function_error(
            f"the directory {directory} has no file named {' or '.join(suffixes)}; for other names or subdirectories "
            f"use a glob, such as '{os.path.join(directory, '**', suffixes[0])}'"
        )
    return files


def _examine(path: str) -> tuple[int, int]:
    """Return the size in bytes and the time of the last change in ns."""
    try:
        facts = os.stat(path)
    except OSError as error:
        raise data_function_error(f"{path} cannot be read: {why_unreadable(error)}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise data_function_error(
            f"{path} is not a regular file; records can be read by offset only from regular files"
        )
    return facts.st_size, facts.st_mtime_ns
