"""`-m tests.processes.forked_command MODULE CWD WORD ...`: a `distlaunch` command, with its modules imported already.

MODULE is `distlaunch`, or one that puts something else in the place of a part. CWD is for `processes_of` alone.
"""

from __future__ import annotations

import os
import runpy
import sys

from distlaunch.base.protocol import LIFELINE_FD

if __name__ == "__main__":
    os.environ.pop(LIFELINE_FD)
    module, _, *words = sys.argv[1:]
    sys.argv = ["distlaunch", *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
