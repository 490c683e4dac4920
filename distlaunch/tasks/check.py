"""`python -m distlaunch.tasks.check`: computes the first steps of a run on one device, beside the task that trains.

The task sends steps through a pipe and receives verdicts. This process ends with its task. Its output goes to a file of
its own, because the user's functions may print.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from distlaunch.base.forked import ForkedProcess, fork
from distlaunch.base.user_modules import begin_program
from distlaunch.config.backend import choose_backend
from distlaunch.config.references.modules import program_of
from distlaunch.tasks.threads import limit_openblas_threads

_WATCH_S = 0.5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m distlaunch.tasks.check", description=__doc__)
    parser.add_argument("--pipe", type=int, required=True, help="descriptor of the pipe to the task")
    parser.add_argument("--backend", required=True)
    parser.add_argument(
        "--cpu-s", type=int, default=0, help="processor time after which the process is killed; 0: no limit"
    )
    parser.add_argument("--idle", action="store_true", help="use idle cores only")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        # ignored, because the task ends this process
        signal.signal(number, signal.SIG_IGN)
    _limit(arguments.cpu_s, idle=arguments.idle)
    choose_backend(arguments.backend)
    # the log is for the output of the user's code, not for TensorFlow's messages
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    _serve(Connection(arguments.pipe), os.getppid(), None)


def fork_check(files: Path, *, is_strict: bool) -> ForkedProcess:
    """Fork a process for the comparison from this one, which has imported the framework and computed nothing.

    Native code must not have started threads in this process; see `num_foreign_threads`.

    Args:
        files: folder of the task's files.
        is_strict: see `CheckProcess`.
    """
    from distlaunch.training.first_steps.process import CHECK_ENVIRONMENT, CHECK_LOG, CPU_S

    parent = os.getpid()

    def run(pipe: Connection) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.environ.update(CHECK_ENVIRONMENT, TF_CPP_MIN_LOG_LEVEL="3")
        if (jax := sys.modules.get("jax")) is not None:  # JAX has read the environment already
            jax.config.update("jax_platforms", "cpu")
        limit_openblas_threads()
        _limit(0 if is_strict else CPU_S, idle=not is_strict)
        _serve(pipe, parent, files / CHECK_LOG)

    return fork(run)


def _limit(cpu_s: int, *, idle: bool) -> None:
    if cpu_s:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if not idle:
        return
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _serve(pipe: Connection, parent: int, log: Path | None) -> None:
    """Answer the task until it ends.

    Args:
        parent: process ID of the task.
        log: file for the output of this process, from the first message on.
    """
    with contextlib.suppress(EOFError, OSError):  # the task has ended
        _answer(pipe, parent, log)


def _answer(pipe: Connection, parent: int, log: Path | None) -> None:
    # imported only now, because these modules import the backend; unpickling the first message needs them
    from distlaunch.patches.tensorflow_autograph import keep_in_memory
    from distlaunch.patches.tensorflow_late import when_imported
    from distlaunch.training.first_steps.pipe_messages import Verdict
    from distlaunch.training.first_steps.reference import Checker

    when_imported(keep_in_memory)
    setup: Any = pipe.recv()
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for number in (1, 2):
            os.dup2(output, number)
    begin_program(program_of(setup.config))
    threading.Thread(target=_watch, args=(parent, setup.memory_limit), daemon=True).start()
    checker = Checker(setup)
    while True:
        message: Any = pipe.recv()
        try:
            answer = checker.answer(message)
        except Exception as error:  # the user's model may raise any error
            from distlaunch.base.code_origins import format_exception, user_line
            from distlaunch.base.errors import reason_of

            print(format_exception(error), flush=True)
            where = user_line(error)
            answer = Verdict(refusal=f"one device has raised {type(error).__name__}: {reason_of(error)}{where}")
        pipe.send(answer)


def _watch(parent: int, memory_limit: int) -> None:
    """End this process with its parent, or if it needs too much memory."""
    from distlaunch.training.first_steps.pipe_messages import MEMORY_EXIT

    process = psutil.Process()
    while os.getppid() == parent:
        if process.memory_info().rss > memory_limit:
            os._exit(MEMORY_EXIT)
        time.sleep(_WATCH_S)
    os._exit(0)


if __name__ == "__main__":
    main()
