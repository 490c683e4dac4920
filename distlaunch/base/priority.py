"""Gives way to training: the priority of processes that only watch a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")
_LOWEST = 19
_ATTEMPTS = 20
_RETRY_S = 0.1


def yield_to_training() -> None:
    """Give this process the lowest priority; meant for the first process of a session.

    Where Linux schedules by session (`sched_autogroup_enabled`, the default of most kernels), a nice value only counts
    among the processes of one session, and every session gets an equal share of a busy CPU. A session has a nice value
    of its own, which is set too. See "The autogroup feature" in sched(7).
    """
    os.nice(_LOWEST)
    if os.getsid(0) != os.getpid():
        return  # training may run in this session, so leave the session's nice value as it is
    for _ in range(_ATTEMPTS):
        try:
            _AUTOGROUP.write_text(str(_LOWEST), encoding="ascii")
        except BlockingIOError:  # all unprivileged users together may write once every 0.1 s
            time.sleep(_RETRY_S)
        except OSError:  # not on Linux, or a kernel without it
            return
        else:
            return
