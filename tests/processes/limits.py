"""Limits of the system for the processes of a test."""

from __future__ import annotations

from collections.abc import Sequence


def with_open_files(soft: int, argv: Sequence[str]) -> list[str]:
    """Return the words that start a command whose shell has this soft limit on open files.

    The limit is not set in the process of the tests, which may have more files open than that.
    """
    return ["sh", "-c", f'ulimit -Sn {soft} && exec "$@"', "sh", *argv]
