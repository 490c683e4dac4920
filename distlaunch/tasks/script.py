"""`python -m distlaunch.tasks.script ... -- SCRIPT ARGS`: runs a user's script as a task, as Python itself would.

Adds what the launcher needs: the lifeline, heartbeats, stacks on request, and `error.json`. The script sees its
own argv, path and `__main__`, gets signals as without it, and decides the exit code.

Every script waits for what is imported here, and may be one of many on a host: only what each run needs, and nothing
that takes long (measured: with argparse, dataclasses and the classes of events it was four times Python's own start).
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import sys
import time
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType

from distlaunch.base.heartbeat import Heartbeat
from distlaunch.base.line_files import LineWriter
from distlaunch.base.protocol import DUMP_SIGNAL, EVENT_FORMAT
from distlaunch.base.run_files.task_dir import TaskDir
from distlaunch.tasks.lifeline import hold_lifeline

_Program = tuple[CodeType, types.ModuleType]


def main() -> None:
    """Runs the script; returns or raises SystemExit as the script does, so that Python ends as it would."""
    split = sys.argv.index("--")
    # the launcher's own words are `--NAME=VALUE`
    own = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:split])
    files, program = TaskDir(Path(own["task-dir"])), sys.argv[split + 1]
    # first of all: whatever hangs below ends with the launcher
    hold_lifeline()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    Heartbeat(files.heartbeat)
    _report_start(files, int(own["attempt"]), own["task"])
    if "jax-processes" in own:
        from distlaunch.strategies.patches import jax_clusters

        jax_clusters.install()
    # before the program is loaded: `_load_module` puts the file of a module in the first place
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
    except BaseException as raised:  # KeyboardInterrupt too: nobody but the script can have raised it
        error = raised
    if error is not None:
        _end_with(error, files)


_KEPT: list[types.ModuleType] = []
"""The module `__main__` of this file, which is still running while the script has that name."""


def _report_start(files: TaskDir, attempt: int, task: str) -> None:
    """A `TaskStarted`, written without its class."""
    stamp = {"event": "TaskStarted", "time": time.time(), "attempt": attempt, "task": task}
    event = {**stamp, "format_version": EVENT_FORMAT, "host": os.uname().nodename, "pid": os.getpid()}
    try:
        writer = LineWriter(files.events)
        writer.write(json.dumps(event, separators=(",", ":")))
        is_written = not writer.behind
        writer.close()
    except OSError:
        is_written = False
    if not is_written:  # a full disk; the launcher takes it for a task that does not come
        print(f"{files.events} cannot be written", file=sys.stderr)


def _load_script(path: str) -> _Program:
    """As `python PATH`."""
    # with -P or PYTHONSAFEPATH Python puts no folder first
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    absolute = os.path.abspath(path)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    return code, _main_module(absolute, SourceFileLoader("__main__", absolute), None)


def _load_module(name: str) -> _Program:
    """As `python -m NAME`, whose sys.path begins with the current directory, as ours does."""
    import importlib.util

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


def _end_with(error: BaseException, files: TaskDir) -> None:
    """Tells the launcher and the log of an exception, and ends as Python does after one."""
    from distlaunch.base.run_files.task_error import write_exception

    error.__traceback__ = _without_own_frames(error.__traceback__)
    write_exception(files, error)
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        import signal

        # dies of the signal, as Python does: shells distinguish that from exit code 130
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """A syntax error in the script has no other frames: its own line is shown."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
