"""Handles standard streams that are closed, cannot be written, or have lost their reader."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, cast


def open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise the next opened file or socket would get the number of the stream and receive its output, and Python
    would have None in place of the stream, so that flushing it would fail.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # `open` returns the lowest free number, which is that of the stream
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
    # do not fail because of names that are not UTF-8, or characters that the terminal's encoding does not have
    stdout: Any = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and stdout.errors == "strict":
        stdout.reconfigure(errors="backslashreplace")
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", closefd=False))


class _Output(io.FileIO):
    """An output file that never raises. It drops data that cannot be written and keeps the first error."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int | None:
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return len(data)


def keep_going_without_readers() -> None:
    """Ignore errors when writing to standard output and standard error.

    A closed pipe, as in `distlaunch schema | head`, or a full disk must not change what a command does. `output_error`
    returns the first error.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        # do not change streams that a test has replaced
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            setattr(sys, name, _with_raw(cast(io.TextIOWrapper, stream), _Output(stream.fileno())))


def _with_raw(stream: io.TextIOWrapper, raw: _Output) -> io.TextIOWrapper:
    options: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
    return io.TextIOWrapper(
        io.BufferedWriter(raw), **options, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


def output_error() -> OSError | None:
    """Return the first error of writing to standard output, or None if everything has been written."""
    raw = _raw_output()
    return raw.error if raw is not None else None


def reader_has_gone() -> bool:
    """Return True if a write to standard output has failed because its reader has closed the pipe."""
    error = output_error()
    return error is not None and error.errno == errno.EPIPE


def _raw_output() -> _Output | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Output) else None
