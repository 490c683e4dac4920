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
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil

from distlaunch.base.user_modules import begin_program
from distlaunch.config.backend import choose_backend
from distlaunch.config.references.modules import program_of

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
        # the task ends this process
        signal.signal(number, signal.SIG_IGN)
    if arguments.idle:
        _use_idle_cores()
    if arguments.cpu_s:
        resource.setrlimit(resource.RLIMIT_CPU, (arguments.cpu_s, arguments.cpu_s + 1))
    parent = os.getppid()
    choose_backend(arguments.backend)
    # the log is for the output of the user's code, not for TensorFlow's messages
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    pipe = Connection(arguments.pipe)
    with contextlib.suppress(EOFError, OSError):  # the task has ended
        _serve(pipe, parent)


def _use_idle_cores() -> None:
    os.nice(19)
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _serve(pipe: Connection, parent: int) -> None:
    # imported only now, because these modules import the backend; unpickling the first message needs them
    from distlaunch.patches.tensorflow_autograph import keep_in_memory
    from distlaunch.training.first_steps.messages import Verdict
    from distlaunch.training.first_steps.reference import Checker

    keep_in_memory()
    setup: Any = pipe.recv()
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
    from distlaunch.training.first_steps.messages import MEMORY_EXIT

    process = psutil.Process()
    while os.getppid() == parent:
        if process.memory_info().rss > memory_limit:
            os._exit(MEMORY_EXIT)
        time.sleep(_WATCH_S)
    os._exit(0)


if __name__ == "__main__":
    main()
