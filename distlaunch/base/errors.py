"""The exceptions of distlaunch, and the exit code of each."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import signal
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FUNCTION = re.compile(r"^\{\{function_node \S+\}\} ")
_OPERATION = re.compile(r" \[Op:\w+\].*$")


class ExitCode(enum.IntEnum):
    """The code that a process returns to a shell or a scheduler. `MEANINGS` has the words for users."""

    DONE = 0
    DIFFERS = 1
    USAGE = 2
    FAILED = 3
    PREEMPTED = 4
    TEMPORARY = 75  # EX_TEMPFAIL
    INTERRUPTED = 130  # 128 + SIGINT, as shells have it


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.DIFFERS: "`verify`: a strategy does not give the numbers of one device",
    ExitCode.USAGE: "your mistake, or what you named is not there or not permitted; nothing was trained",
    ExitCode.FAILED: "the job fails and would fail again, or output is lost; the summary says why and what to do",
    ExitCode.PREEMPTED: "`train` and `run`: stopped; run again to continue",
    ExitCode.TEMPORARY: "a cause outside the job: a host or task is lost, no space, a run that another launcher holds; "
    "a later try may succeed",
    ExitCode.INTERRUPTED: "other commands: interrupted with Ctrl-C; 128 + the signal for other signals",
}
"""The one list of exit codes: `--help` and the documents show it."""

_OUTSIDE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO)
_ABSENT_ERRNOS = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG
)  # fmt: skip
OUTSIDE_ERRORS = tuple(os.strerror(number) for number in _OUTSIDE_ERRNOS)
"""The words of the system for a disk that is full or does not answer."""


def code_of_os_error(error: OSError) -> ExitCode:
    """Return the exit code of an error of the system that ends a command."""
    if error.errno in _OUTSIDE_ERRNOS:
        return ExitCode.TEMPORARY
    return ExitCode.USAGE if error.errno in _ABSENT_ERRNOS and error.filename is not None else ExitCode.FAILED


_LONGEST = 1000
"""Characters of a key, and of the place of a value, in a message."""
_MOST_SHOWN = 100
"""Problems that a message lists."""


class Problem(NamedTuple):
    """One mistake in a config.

    Attributes:
        key: where in the config, as keys and list indices, e.g. `("strategy", "kind")`.
        message: what was received, what is allowed, what to do.
        source: the file or override that holds the value, e.g. `run.yaml:12` or `--set`; None when unknown.
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
        """Return a problem from the result of `to_plain`. Raise KeyError or TypeError if it is none."""
        return Problem(tuple(data["key"]), str(data["message"]), data.get("source"))

    def __str__(self) -> str:
        return ": ".join(part for part in (_short(self.source or ""), self.dotted, self.message) if part)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message that says something; the name of its type if there is none."""
    for line in str(error).splitlines():
        plain = _COLOURS.sub("", line).strip().strip("'")
        # what Keras and TensorFlow put around the words of an operation
        plain = _OPERATION.sub("", _FUNCTION.sub("", plain)).strip()
        if plain and not plain.startswith("Exception encountered when calling"):
            return plain.removesuffix(".")
    return type(error).__name__


class DistlaunchError(Exception):
    """An error that is shown to the user as its message alone, without a traceback."""

    exit_code = ExitCode.FAILED


class ConfigError(DistlaunchError, ValueError):
    """The config is wrong. Holds every problem that was found, not only the first."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: list[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        more = len(self.problems) - _MOST_SHOWN
        lines = [str(problem) for problem in self.problems[:_MOST_SHOWN]]
        super().__init__("\n".join([*lines, *([f"and {more:,} more"] if more > 0 else [])]))


class FrameworkError(ConfigError):
    """The installed version of a framework lacks something that distlaunch depends on.

    It is reported as mistakes in the config are: nothing was trained, and trying again does not help.

    Args:
        installed: the framework and its version, e.g. `keras 3.17.0`.
    """

    def __init__(self, installed: str, message: str) -> None:
        super().__init__(Problem((), message, installed))


class UsageError(DistlaunchError, ValueError):
    """The command line or the environment asks for something that cannot be done; nothing was started."""

    exit_code = ExitCode.USAGE


class RunBusyError(UsageError):
    """The run directory belongs to a run that is still going on."""

    exit_code = ExitCode.TEMPORARY


class HostsError(UsageError):
    """Hosts cannot be reached, or do not answer, for a reason that may pass."""

    exit_code = ExitCode.TEMPORARY


class QueueBusyError(DistlaunchError):
    """A scheduler has refused a request, or did not answer, for a reason that may pass."""

    exit_code = ExitCode.TEMPORARY


class NotStoppedError(DistlaunchError):
    """A run was asked to stop and has not ended in time."""

    exit_code = ExitCode.TEMPORARY


class DataError(DistlaunchError):
    """The data is not what it was, or not the same in all processes."""


class NonFiniteError(DistlaunchError):
    """A loss or a weight is not a finite number, and training cannot mend it."""


class CheckpointError(DistlaunchError):
    """No checkpoint can be read, or the one asked for is damaged."""


class CheckpointWriteError(DistlaunchError):
    """The last checkpoint of a run cannot be written."""


class StopRequested(BaseException):
    """A signal asked the job to end while it waited for hosts and no task ran.

    Like KeyboardInterrupt it is no Exception, so that error handlers let it pass.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped ({number.name}) before any task was started; run the same command again")
        self.number = number
        self.exit_code: int = ExitCode.PREEMPTED


_RUN = "run: "


@contextlib.contextmanager
def naming_run(run: str) -> Generator[None]:
    """Make errors of the block name a run: in a log of several runs, nothing else tells whose error it is.

    Args:
        run: its directory, as users write it.
    """
    try:
        yield
    except (DistlaunchError, StopRequested, OSError) as error:
        error.add_note(f"{_RUN}{run}")
        raise


def message_of(error: DistlaunchError | StopRequested | OSError) -> str:
    """Return what users read of an error that ends a command, each line with the run that it is about."""
    if isinstance(error, OSError):
        text = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    else:
        text = str(error)
    notes: list[str] = getattr(error, "__notes__", [])
    run = next((note.removeprefix(_RUN) for note in notes if note.startswith(_RUN)), "")
    return about_run(run, text)


def about_run(run: str, text: str) -> str:
    """Return a text whose lines begin with a run, unless they name it."""
    if not run:
        return text
    is_named = re.compile(rf"{re.escape(run)}(?![\w-])")
    return "\n".join(line if is_named.search(line) else f"{run}: {line}" for line in text.split("\n"))
