"""`-m tests.processes.forked_launcher BACKEND WORD ...`: the `distlaunch` command, where BACKEND is imported already.

Before it begins, it forks what its tasks will be forked from, and processes that it asks for something.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading

from distlaunch.agent import warm_process
from distlaunch.agent.messages import Preload
from distlaunch.agent.warm_starts import WarmProcess, WarmStarts
from distlaunch.base import helper_process
from distlaunch.base.protocol import LIFELINE_FD, UNBUFFERED
from distlaunch.cluster.settings import KEPT
from distlaunch.engines import local
from distlaunch.plan.train import READ_LATE, USES
from distlaunch.tasks.process_end import end_process
from tests.processes.forked_helpers import ForkedHelpers
from tests.processes.warm_launcher import Forked


def main() -> None:
    backend, *words = sys.argv[1:]
    os.environ.pop(LIFELINE_FD)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        warm_process.serve(theirs)
        sys.exit()  # in a task
    theirs.close()
    process = WarmProcess(ours, Forked(pid))
    process.unfit, process.was_fit = "", True
    warm_starts = WarmStarts()
    for use in ("", *USES):  # this process has made ready what training needs, and so all of it
        what = Preload("distlaunch.tasks.preload", (backend, *use.split()), READ_LATE)
        warm_starts.add(sys.executable, what, {**os.environ, **UNBUFFERED}, process)
    for name in KEPT:  # the launcher decides them by itself
        os.environ.pop(name, None)
    helper_process.subprocess = ForkedHelpers(process, what)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = ["distlaunch", *words]
    end_process.skip_earlier_hooks()
    local.WarmStarts = lambda: warm_starts  # pyright: ignore[reportAttributeAccessIssue]
    with warm_starts.kept():  # else a command that asks more than once would lose the process after the first time
        try:
            runpy.run_module("distlaunch", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
    _end(code)


def _end(code: str | int | None) -> None:
    """Exit as Python does, but without tearing down the frameworks.

    Tearing them down takes 0.2 s of CPU, mostly because their memory pages are copied.
    """
    if isinstance(code, str):
        sys.exit(code)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    end_process(code or 0)


if __name__ == "__main__":
    main()
