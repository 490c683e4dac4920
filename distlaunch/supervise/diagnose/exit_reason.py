"""The reason why a task has failed, from its error.json, the end of its log, and its exit code or signal."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from textwrap import dedent

from distlaunch.agent.log_noise import is_noise
from distlaunch.base.errors import OUTSIDE_ERRORS, ExitCode, Problem
from distlaunch.base.regular_files import open_regular, read_json
from distlaunch.base.run_files.task_dir import TaskDir
from distlaunch.supervise.diagnose.user_frames import crash_frames, node_definition, shortened
from distlaunch.supervise.facts import PREEMPTION_CODE, ErrorRole

# errors that TensorFlow raises in a task when another task is gone
_CONSEQUENCES = {"UnavailableError", "DeadlineExceededError", "AbortedError", "CancelledError"}
_CONSEQUENCE_TEXT = re.compile(
    r"collective ops? (?:is |are )?(?:aborted|cancelled)|Collective ops is aborted|Connection reset by peer"
    r"|Socket closed|failed to connect to all addresses|peer .* is (?:unreachable|gone)|heartbeat timeout"
    # all errors of JAX have the same type
    r"|Gloo [\w-]+ failed|Connection closed by peer|stopped sending heartbeats|^UNAVAILABLE: ",
    re.IGNORECASE,
)
_UNHEARD = re.compile(r"stopped sending heartbeats|CoordinationService/Heartbeat")
_ABORTED = "Terminating process because the JAX distributed service detected fatal errors"
"""Text that JAX logs before it aborts a process that has lost a peer."""
_TAIL_BYTES = 64 * 1024  # how much of the end of a log is read
_LAST_LINES = 15
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


_LISTING = "Arguments received by"
"""Beginning of the list of arguments that Keras appends to an error message."""


@dataclass(frozen=True)
class TaskError:
    """The report of a task about its failure.

    Attributes:
        summary: the last line of the exception, e.g. `ValueError: no`.
        user_error: the message explains the error completely, so no traceback is shown.
        problems: problems in the config that only a task can find.
        kind: the exception's class; empty if there was no exception.
        consequence: True if it reports that another task is gone.
        is_heartbeat_loss: True if it reports only missing heartbeats. The other task may still run.
        step: the number of finished steps at that time; None before the first step.
        lost: True if it reports that the task's host is lost.
    """

    summary: str
    traceback: str = ""
    host: str = ""
    user_error: bool = False
    problems: tuple[Problem, ...] = ()
    consequence: bool = False
    step: int | None = None
    kind: str = ""
    lost: bool = False
    is_heartbeat_loss: bool = False

    @property
    def mark(self) -> str:
        """Return the exception and its step; empty if the cause is outside the task."""
        at = "" if self.step is None else f" at step {self.step}"
        return "" if self.consequence or self.lost else f"{self.summary}{at}"

    @property
    def role(self) -> ErrorRole:
        if self.problems:
            return ErrorRole.CONFIG
        return ErrorRole.CONSEQUENCE if self.consequence else ErrorRole.CAUSE


@dataclass(frozen=True)
class Failure:
    """The description of a failure for users.

    Attributes:
        task: the task that failed first; empty if no single task is to blame.
        host: the host of the task.
        reason: what happened, in one sentence.
        detail: the last lines of the traceback, or of the log if there is no traceback.
        hint: what may help, if known.
        first: what to do before resuming the run; empty if nothing.
        resumable: whether the run can be resumed after that.
        step: the number of finished steps when the task failed, if its error.json has it.
        place: file and line of the last frame of the user's code in the traceback; None if there is none.
    """

    task: str
    host: str
    reason: str
    detail: tuple[str, ...]
    log: Path | None
    user_error: bool = False
    hint: str = ""
    step: int | None = None
    first: str = ""
    resumable: bool = True
    place: tuple[str, int] | None = None


def read_error(files: TaskDir) -> TaskError | None:
    """Return the content of error.json, or the error found in the log; None if there is neither."""
    if not files.error_json.exists():
        return _aborted(files)
    try:
        data = read_json(files.error_json)
        if data["kind"] == "config":
            problems = tuple(Problem.from_plain(item) for item in data["problems"])
            return TaskError("the config is wrong", problems=problems)
        if data["kind"] in ("signal", "exit", "stall"):  # written by the launcher
            return _aborted(files)
        if data["kind"] == "lost":
            shown = str(data["message"])
            return TaskError(shown, host=str(data["host"]), user_error=True, step=data["step"], lost=True)
        kind, message = str(data["type"]), str(data["message"]).strip()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_user_error = bool(data.get("user_error"))  # its message is complete
    return TaskError(
        summary=message if is_user_error else _summary(kind, message),
        traceback=str(data.get("traceback") or ""),
        host=str(data.get("host") or ""),
        user_error=is_user_error,
        kind=kind,
        consequence=kind in _CONSEQUENCES or bool(_CONSEQUENCE_TEXT.search(message)),
        step=data.get("step"),
        is_heartbeat_loss=bool(_UNHEARD.search(message)),
    )


def _summary(kind: str, message: str) -> str:
    if not message:
        return kind
    text = headline(message)
    # the message of an error in a compiled function may already start with the name of the exception, which is that of
    # the user's code if an operation called it, such as a generator
    is_named = text.startswith(f"{kind}: ") or (message.startswith(GRAPH_ERROR) and _NAMED.match(text))
    return text if text == kind or is_named else f"{kind}: {text}"


def step_of(files: TaskDir) -> int | None:
    """Return the step in the task's error.json, which describes an exception or a signal; None if it has no step."""
    try:
        step = read_json(files.error_json)["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _aborted(files: TaskDir) -> TaskError | None:
    if _ABORTED not in _tail_text(files.stderr_log):
        return None
    return TaskError("JAX ended the process because another task is gone or does not answer", consequence=True)


def describe_code(code: int, *, oom: bool | None = None) -> str:
    """Describe how a process ended.

    Args:
        oom: whether the kernel's OOM killer ended it; None if unknown.
    """
    if code >= 0:
        if code == 0:
            return "ended with exit code 0 before training was done"
        # the exit code of shells for an unknown command
        known = " (did not start: command not found)" if code == 127 else ""
        return f"ended with exit code {code}{known}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL and oom:
        return "killed by SIGKILL: out of memory (the kernel's OOM killer ended it)"
    if -code == signal.SIGKILL and oom is None:
        return "killed by SIGKILL; sent by another process, or by the kernel because memory ran out (see `dmesg`)"
    if -code == signal.SIGKILL:
        return "killed by SIGKILL, but not by the kernel's OOM killer"
    return f"killed by {name}"


_EXCEPTION_CODES = (ExitCode.FAILED, ExitCode.TEMPORARY)
"""Exit codes of our tasks after an exception."""


def explain_exit(code: int | None, error: TaskError | None, *, oom: bool | None = None) -> str:
    """Return the reason for a task's failure: the reported exception, if any, and how its process ended."""
    how = describe_code(code, oom=oom) if code is not None else ""
    if error is None:
        return how or "failed"
    # if a process does not exit after its exception, the launcher kills it
    plain_exit = code is None or code in (1, *_EXCEPTION_CODES, -signal.SIGTERM, -signal.SIGKILL)
    return error.summary if plain_exit else f"{error.summary} ({how})"


def describe_end(code: int, error: TaskError | None) -> str:
    """Return a predicate for the name of a task: `was killed by SIGKILL`, `ended with exit code 3 (...)`."""
    if code < 0:
        return f"was {describe_code(code).partition(';')[0]}"
    if error is None:
        return f"ended with exit code {code}"
    shown = "; ".join(str(problem) for problem in error.problems) or error.summary
    return f"ended with exit code {code} ({shown})"


_IMPORTS = ("ImportError", "ModuleNotFoundError", "SyntaxError")


def is_outside(code: int | None, error: TaskError | None) -> bool:
    """Return True if the end of a task points outside its program: a signal, a lost peer, a preemption.

    A crash of native code is a failure of the program itself, and may recur.
    """
    if error is not None:
        return error.lost or error.role is ErrorRole.CONSEQUENCE
    if code is None or _signal_of(code) in _CRASHES:
        return False
    # shells and containers report a signal as an exit code of 128 or more
    return code < 0 or code == PREEMPTION_CODE or code >= 128


_SENT_SIGNALS = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGPWR,
)  # fmt: skip
"""Signals that a user, a scheduler or the system sends. Other signals report an error of the program itself."""
_DISK_ERRORS = ("OSError", "CheckpointWriteError", "ResourceExhaustedError", "UnknownError", "InternalError")
"""Exceptions that may report an error of the disk."""


def is_from_outside(code: int | None, error: TaskError | None, *, oom: bool | None) -> bool:
    """Return True if the cause of a task's end is proven to be outside its program, and may disappear.

    Args:
        oom: whether the kernel's OOM killer ended the process. The same program would run out of memory again.
    """
    if error is not None:
        is_of_disk = error.kind in _DISK_ERRORS and any(text in error.summary for text in OUTSIDE_ERRORS)
        return error.lost or is_of_disk
    if code is None:
        return False
    number = _signal_of(code)
    if number == signal.SIGKILL and oom:
        return False
    return code in (PREEMPTION_CODE, ExitCode.TEMPORARY) or number in _SENT_SIGNALS


_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def _signal_of(code: int) -> int:
    """Return the signal in an exit code of a process or a shell, or 0 if there is none."""
    return -code if code < 0 else max(0, code - 128)


def may_be_temporary(error: TaskError | None, *, reports_steps: bool = True) -> bool:
    """Return True if an exception may not recur.

    Errors in the config, import errors and, if steps are reported, errors before the first step count as permanent.
    """
    if error is None or error.user_error or error.role is ErrorRole.CONFIG or (reports_steps and error.step is None):
        return False
    return not error.summary.startswith(_IMPORTS)


_PERMANENT_CODES = (ExitCode.DONE, ExitCode.USAGE, 126, 127)
"""Exit codes after which a restart cannot help: success, wrong usage, and shells that cannot run a program."""


def may_get_further(code: int | None, step: int | None, *, reports_steps: bool = True) -> bool:
    """Return True if a task that exited without an exception may get further after a restart."""
    return code is not None and code not in _PERMANENT_CODES and (step is not None or not reports_steps)


def last_lines(files: TaskDir, error: TaskError | None, limit: int = _LAST_LINES) -> tuple[str, ...]:
    """Return the end of the traceback, else of the error log, else of the output, without noise of TensorFlow."""
    # the message of a user error is complete
    if error is not None and error.user_error:
        return ()
    if error is not None and error.traceback.strip():
        trace = _COLOURS.sub("", error.traceback).rstrip().splitlines()
        shown = _without_listing(trace)
        # the exception was raised where the graph was called: show where its failed operation was created instead
        if place := node_definition(trace):
            shown = [*place, *dropwhile(lambda line: not line.endswith(GRAPH_ERROR), shown)]
        shown = [line for line in shown if line.strip("\t ^~|.,") and not _NUMBERS.fullmatch(line)]
        return _tail_of(shortened([line for line in shown if not is_noise(line)], limit), limit)
    lines = _lines_of(log_with_content(files))
    # faulthandler lists all threads, so the last lines may be those of an unrelated thread
    return _tail_of(crash_frames(lines)[:limit] or lines, limit)


def log_with_content(files: TaskDir) -> Path:
    """Return the error log, or the output if only that has content."""
    found = (path for path in (files.stderr_log, files.stdout_log) if _lines_of(path))
    return next(found, files.stderr_log)


def _lines_of(path: Path) -> list[str]:
    """Return the end of a log, without noise of TensorFlow."""
    return [line for line in _tail_text(path).splitlines() if line.strip() and not is_noise(line)]


_NUMBERS = re.compile(r"(?=.*\d)[\s\[\](){}\d.,e+-]*")
"""A line of a large array."""


def _tail_of(lines: list[str], limit: int) -> tuple[str, ...]:
    return tuple(cut(line) for line in lines[-limit:])


def _tail_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            # a log may have gigabytes: read only its end
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            # the first character may be incomplete; progress bars end with \r
            return file.read().decode(errors="replace").replace("\r", "\n")
    except OSError:
        return ""


def headline(message: str) -> str:
    """Return the most informative line of an error message, without lists of graph errors and frames of AutoGraph."""
    lines = [_COLOURS.sub("", line) for line in _without_listing(message.splitlines())]
    lines = [line for line in takewhile(lambda line: not line.lstrip().startswith(_LISTING), lines) if line.strip()]
    # a message of AutoGraph has `in user code:`, the frames, and then the error
    if message.lstrip().startswith(_USER_CODE) and (cause := message.strip().split("\n\n", 2)[2:]):
        return headline(dedent(cause[0]))
    # several operations that failed at once have a line each
    heads = [line for line in lines if not line.startswith((GRAPH_ERROR, _NO_STACK)) and not _SEVERAL.match(line)]
    line = _ROOT_PREFIX.sub("", heads[0]) if heads else lines[0] if lines else ""
    if line.endswith(_OPENING) and lines[-1].lstrip().startswith(_CLOSING):
        line = f"{line} ... {lines[-1].strip()}"  # shorten a value that spans many lines
    if line.startswith("Exception encountered when calling") and len(lines) > lines.index(line) + 1:
        line = f"{line} {lines[lines.index(line) + 1].strip()}"  # Keras writes the reason in the next line
    return cut(line)


GRAPH_ERROR = "Graph execution error:"
_NO_STACK = "<stack traces unavailable>"
_NAMED = re.compile(r"[A-Za-z_.]*(?:Error|Exception): ")


_USER_CODE = "in user code:"


_SEVERAL = re.compile(r"\d+ root error\(s\) found\.")


# such as `  (0) INVALID_ARGUMENT:  {{function_node __wrapped__X}} text`
_ROOT_PREFIX = re.compile(r"^(?:\s*\(\d+\) [A-Z_]+: +)?(?:\{\{function_node \S+\}\} +)?")


_OPENING, _CLOSING = ("{", "[", "("), ("}", "]", ")")


def cut(line: str) -> str:
    # an array in a message may be thousands of characters long
    return line if len(line) <= 400 else line[:400] + " ..."


def _without_listing(lines: list[str]) -> list[str]:
    """Remove the lists of frames below `Detected at node ...`, and names of nodes."""
    kept: list[str] = []
    listing = False
    for line in lines:
        in_list = not line.strip() or line.startswith(("  File ", "    "))
        listing = line.startswith("Detected at node") or (listing and in_list)
        if not listing and not line.lstrip().startswith("[[{{node"):
            kept.append(line)
    return kept
