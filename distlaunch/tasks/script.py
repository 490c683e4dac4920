"""Runs a user's script as a task, as Python itself would; its arguments are `--NAME=VALUE ... -- SCRIPT ARGS`.

Adds what the launcher needs: the lifeline, heartbeats, stacks on request, and `error.json`. The script sees its
own argv, path and `__main__`, receives signals as usual, and decides the exit code.

Every script waits for the imports of this module, and may be one of many on a host, so this module imports only what
each run needs. Measured: with argparse, dataclasses and the event classes, a script took four times as long to start as
with Python alone.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import time
import types
from typing import TYPE_CHECKING

from distlaunch.base.heartbeat import Heartbeat
from distlaunch.base.protocol import EVENT_FORMAT
from distlaunch.base.run_files.task_dir import EVENTS, HEARTBEAT
from distlaunch.base.signals import DUMP_SIGNAL
from distlaunch.tasks.lifeline import hold_lifeline

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_PATH = list(sys.path)
"""The module search path without the script's folder."""
_Program = tuple[types.CodeType, types.ModuleType]


def main() -> None:
    """Run the script; return or raise SystemExit as the script does, so that Python ends as it would."""
    split = sys.argv.index("--")
    # the launcher's own arguments are `--NAME=VALUE`
    own = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:split])
    folder, program = own["task-dir"], sys.argv[split + 1]
    # called first, so that the task ends with the launcher even if something below hangs
    hold_lifeline()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    Heartbeat(os.path.join(folder, HEARTBEAT))
    report_start(folder, int(own["attempt"]), own["task"])
    if "jax-processes" in own:
        from distlaunch.patches import jax_clusters

        jax_clusters.install()
    # before the program is loaded, since `_load_module` replaces the first argument by the module's file
    sys.argv = sys.argv[split + 1 :]
    error = None
    try:
        code, module = _load_module(program) if own["kind"] == "module" else _load_script(program)
        _KEPT.append(sys.modules["__main__"])
        # pickle and multiprocessing look the script's names up there
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as raised:  # KeyboardInterrupt too: only the script can have raised it
        error = raised
    if error is not None:
        _end_with(error, folder)


_KEPT: list[types.ModuleType] = []
"""The module `__main__` of this file, which is still running while the script has that name."""


def report_start(folder: str, attempt: int, task: str) -> None:
    """Write a `TaskStarted` event to the task's event file, without importing the event's class or `json`."""
    stamp = f'"event":"TaskStarted","time":{time.time()!r},"attempt":{attempt},"task":{_quoted(task)}'
    host = f'"format_version":{EVENT_FORMAT},"host":{_quoted(os.uname().nodename)},"pid":{os.getpid()}'
    path, line = os.path.join(folder, EVENTS), f"{{{stamp},{host}}}\n".encode()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(fd).st_size
        # a previous process of the task may have left half a line on a full disk
        line = b"\n" + line if size and os.pread(fd, 1, size - 1) != b"\n" else line
        is_written = os.write(fd, line) == len(line)
        os.close(fd)
    except OSError:
        is_written = False
    if not is_written:  # a full disk; to the launcher, the task does not start
        print(f"{path} cannot be written", file=sys.stderr)


def _quoted(text: str) -> str:
    """Return a string as JSON."""
    safe = (char if (char.isascii() and char.isalnum()) or char in ":-._" else _escaped(ord(char)) for char in text)
    return f'"{"".join(safe)}"'


def _escaped(code: int) -> str:
    """Return JSON's escape of a character; beyond 16 bits, a surrogate pair as in UTF-16."""
    if code > 0xFFFF:
        return _escaped(0xD7C0 + (code >> 10)) + _escaped(0xDC00 + (code & 0x3FF))
    return f"\\u{code:04x}"


def _load_script(path: str) -> _Program:
    """Load a script like `python PATH`."""
    # with PYTHONSAFEPATH Python inserts no folder
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    loader = type(__loader__)("__main__", absolute)  # this file was loaded from source too
    return code, _main_module(absolute, loader, None)


def _load_module(name: str) -> _Program:
    """Load a module like `python -m NAME`, for which sys.path begins with the current directory."""
    import importlib.util

    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    sys.argv[0] = spec.origin or name
    return code, _main_module(spec.origin, spec.loader, spec)


def _main_module(path: str | None, loader: object, spec: ModuleSpec | None) -> types.ModuleType:
    module = types.ModuleType("__main__")
    package = spec.parent if spec is not None else None
    vars(module).update(
        __file__=path, __loader__=loader, __spec__=spec, __package__=package, __cached__=spec.cached if spec else None
    )
    vars(module)["__builtins__"] = sys.modules["builtins"]
    return module


def _end_with(error: BaseException, folder: str) -> None:
    """Report an exception to the launcher and the log, and exit as Python does after one."""
    # the script's folder may contain files with the names of modules that are imported here
    theirs, sys.path[:] = list(sys.path), _PATH
    from pathlib import Path

    from distlaunch.base.run_files.task_dir import TaskDir
    from distlaunch.base.run_files.task_error import write_exception

    error.__traceback__ = _without_own_frames(error.__traceback__)
    write_exception(TaskDir(Path(folder)), error)
    sys.path[:] = theirs
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        # ends by the signal, as Python does: shells distinguish that from exit code 130
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without frames of this file; for a syntax error in the script, no frame is left."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
