"""`-m tests.processes.forked_launcher BACKEND WORD ...`: the `distlaunch` command, where BACKEND is imported already.

Before it begins, it forks what its tasks will be forked from, and processes that it asks for something.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

from distlaunch.agent import warm_process
from distlaunch.agent.messages import Preload
from distlaunch.agent.warm_starts import WarmProcess
from distlaunch.base import helper_process
from distlaunch.base.protocol import LIFELINE_FD, UNBUFFERED
from distlaunch.engines.local import WARM_STARTS
from distlaunch.plan.preload import READ_LATE, USES
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
        sys.exit()
    theirs.close()
    process = WarmProcess(ours, Forked(pid))
    process.unfit, process.was_fit = "", True
    for use in ("", *USES):  # this process has made ready what training needs, and so all of it
        what = Preload("distlaunch.tasks.preload", (*backend.split(), *use.split()), READ_LATE)
        WARM_STARTS.add(sys.executable, what, {**os.environ, **UNBUFFERED}, process)
    helper_process.subprocess = ForkedHelpers(process, what)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = ["distlaunch", *words]
    with WARM_STARTS.kept():  # else a command that asks more than once would lose the process after the first time
        runpy.run_module("distlaunch", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
