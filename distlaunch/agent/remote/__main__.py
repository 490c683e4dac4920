"""`python -m distlaunch.agent.remote`: the agent. Standard input and output are its connection to the launcher."""

from __future__ import annotations

import os
import signal
import stat
import sys

from distlaunch.base.signals import DUMP_SIGNAL, STOP_SIGNALS


def main() -> None:
    """Serve until the connection ends."""
    if not any(test(os.fstat(0).st_mode) for test in (stat.S_ISFIFO, stat.S_ISSOCK)):
        sys.exit("this is distlaunch's agent; `distlaunch train` starts it on the hosts of a job")
    # before the imports, so that text printed by them does not get into the connection
    reading, writing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    # A scheduler sends these signals to all processes of a job. Tasks stop with a checkpoint, which this process must
    # still send. If the launcher is gone, the connection ends.
    for number in (signal.SIGHUP, signal.SIGINT, *STOP_SIGNALS, DUMP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    from distlaunch.agent.remote.service import Agent

    Agent(reading, writing).serve()
    # exit at once, since a normal exit may wait for a thread of a driver
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
