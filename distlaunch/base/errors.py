"""The exceptions of distlaunch, and the exit code of each."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import signal
from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FUNCTION = re.compile(r"^\{\{function_node \S+\}\} ")
_OPERATION = re.compile(r" \[Op:\w+\].*$")


class ExitCode(enum.IntEnum):
    """The exit code of a process. `MEANINGS` has the descriptions for users."""

    DONE = 0
    DIFFERS = 1
    USAGE = 2
    FAILED = 3
    PREEMPTED = 4
    TEMPORARY = 75  # EX_TEMPFAIL
    INTERRUPTED = 130  # 128 + SIGINT, as in shells


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.DIFFERS: "`verify`: a strategy does not give the numbers of one device",
    ExitCode.USAGE: "wrong usage or config, or a file that is missing or not accessible; nothing was trained",
    ExitCode.FAILED: "the job or command failed and would fail again, or output is lost; a message gives the cause",
    ExitCode.PREEMPTED: "`train`, `run`, `wait` and `submit --wait`: the job was stopped; start it again to continue",
    ExitCode.TEMPORARY: "a cause outside the job: a lost host or task, a full disk, a run that another launcher holds; "
    "a later try may succeed",
    ExitCode.INTERRUPTED: "other commands: interrupted with Ctrl-C; 128 + the signal for other signals",
}
"""Descriptions of the exit codes, shown by `--help` and in the documents."""

_OUTSIDE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO)
_ABSENT_ERRNOS = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG
)  # fmt: skip
OUTSIDE_ERRORS = tuple(os.strerror(number) for number in _OUTSIDE_ERRNOS)
"""Messages of the system for a disk that is full or does not answer."""


def code_of_os_error(error: OSError) -> ExitCode:
    """Return the exit code for an OSError that ends a command."""
    if error.errno in _OUTSIDE_ERRNOS:
        return ExitCode.TEMPORARY
    return ExitCode.USAGE if error.errno in _ABSENT_ERRNOS and error.filename is not None else ExitCode.FAILED


_MAX_LENGTH = 1000
"""Maximum number of characters of a key or a source in a message."""
_MAX_SHOWN = 100
"""Maximum number of problems that a message lists."""


class Problem(NamedTuple):
    """A problem in a config.

    Attributes:
        key: its place in the config, as keys and list indices, e.g. `("strategy", "kind")`.
        message: the received value, the allowed values, and what to do.
        source: the file or override that has the value, e.g. `run.yaml:12` or `--set`; None if unknown.
    """

    key: tuple[str | int, ...]
    message: str
    source: str | None = None

    @property
    def dotted(self) -> str:
        """Return the key as users write it: `train.callbacks[0].name`."""
        text = ""
        for part in self.key:
            text += f"[{part}]" if isinstance(part, int) else f".{_short(part)}" if text else _short(part)
        return text

    def to_plain(self) -> dict[str, Any]:
        """Return this problem in the types of JSON."""
        return {"key": list(self.key), "message": self.message, "source": self.source}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Problem:
        """Return a problem from the result of `to_plain`. Raise KeyError or TypeError if the data is malformed."""
        return Problem(tuple(data["key"]), str(data["message"]), data.get("source"))

    def __str__(self) -> str:
        return ": ".join(part for part in (_short(self.source or ""), self.dotted, self.message) if part)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def reason_of(error: BaseException) -> str:
    """Return the first informative line of an error's message, or the name of its type if there is none."""
    return _first_informative(str(error).splitlines()).removesuffix(".") or type(error).__name__


def explanation_of(error: BaseException) -> str:
    """Return the first informative paragraph of an error's message as one line, after the name of the error's type."""
    paragraphs = (" ".join(map(str.strip, part.splitlines())) for part in re.split(r"\n\s*\n", str(error)))
    return f"{type(error).__name__}: {_first_informative(paragraphs)}"


def _first_informative(parts: Iterable[str]) -> str:
    for part in parts:
        plain = _COLOURS.sub("", part).strip().strip("'")
        # remove the text that Keras and TensorFlow add to the message of an operation
        plain = _OPERATION.sub("", _FUNCTION.sub("", plain)).strip()
        if plain and not plain.startswith("Exception encountered when calling"):
            return plain
    return ""


class DistlaunchError(Exception):
    """An error that is shown to the user as a message without a traceback."""

    exit_code = ExitCode.FAILED


class ConfigError(DistlaunchError, ValueError):
    """The config is wrong. The error has all problems that were found."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: list[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        more = len(self.problems) - _MAX_SHOWN
        lines = [str(problem) for problem in self.problems[:_MAX_SHOWN]]
        super().__init__("\n".join([*lines, *([f"and {more:,} more"] if more > 0 else [])]))


class FrameworkError(ConfigError):
    """The installed version of a framework lacks a part that distlaunch depends on.

    It is reported like a problem in the config, since nothing was trained and another try would not help.

    Args:
        installed: the framework and its version, e.g. `keras 3.17.0`.
        message: the missing part, and what to do.
    """

    def __init__(self, installed: str, message: str) -> None:
        super().__init__(Problem((), message, installed))


class UsageError(DistlaunchError, ValueError):
    """The command line or the environment cannot be used. Nothing was started."""

    exit_code = ExitCode.USAGE


class RunBusyError(UsageError):
    """Another process works on the run."""

    exit_code = ExitCode.TEMPORARY


class HostsError(UsageError):
    """Hosts cannot be reached or do not answer, for a reason that may be temporary."""

    exit_code = ExitCode.TEMPORARY


class QueueBusyError(DistlaunchError):
    """A scheduler has refused a request or did not answer, for a reason that may be temporary."""

    exit_code = ExitCode.TEMPORARY


class NotStoppedError(DistlaunchError):
    """A run was asked to stop and has not ended in time."""

    exit_code = ExitCode.TEMPORARY


class DataError(DistlaunchError):
    """The data cannot be read, or differs between processes."""


class NonFiniteError(DistlaunchError):
    """A loss or a weight is not finite, and further training cannot repair that."""


class CheckpointError(DistlaunchError):
    """No checkpoint can be read, or the requested checkpoint is damaged."""


class CheckpointWriteError(DistlaunchError):
    """The last checkpoint of a run cannot be written."""


class StopRequested(BaseException):
    """A signal asked the job to end while it waited for hosts and no task ran.

    Like KeyboardInterrupt, it does not derive from Exception, so that error handlers do not catch it.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped ({number.name}) before any task was started; run the same command again")
        self.number = number
        self.exit_code: int = ExitCode.PREEMPTED


_RUN = "run: "


@contextlib.contextmanager
def naming_run(run: str) -> Generator[None]:
    """Add the name of a run to errors raised in the block, so that a log of several runs is unambiguous.

    Args:
        run: the directory of the run as shown to users.
    """
    try:
        yield
    except (DistlaunchError, StopRequested, OSError) as error:
        error.add_note(f"{_RUN}{run}")
        raise


def message_of(error: DistlaunchError | StopRequested | OSError) -> str:
    """Return the user-facing message for an error that ends a command, with the name of the run in each line."""
    if isinstance(error, OSError):
        text = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    else:
        text = str(error)
    notes: list[str] = getattr(error, "__notes__", [])
    run = next((note.removeprefix(_RUN) for note in notes if note.startswith(_RUN)), "")
    return about_run(run, text)


def about_run(run: str, text: str) -> str:
    """Return a text with the name of the run at the beginning of each line that does not contain it."""
    if not run:
        return text
    is_named = re.compile(rf"{re.escape(run)}(?![\w-])")
    return "\n".join(line if is_named.search(line) else f"{run}: {line}" for line in text.split("\n"))
