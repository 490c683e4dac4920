"""`cluster.isolate`: hides the ports of a job on this machine from other hosts."""

from __future__ import annotations

import os
import socket
import sys

from distlaunch.agent.remote.host_facts import is_loopback
from distlaunch.base.errors import UsageError
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.config.read.text import readable_again
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Engine
from distlaunch.engines.context import LaunchContext


def isolate(engine: Engine) -> None:
    """Restart this command in a new network namespace, unless it already runs in one.

    Call this function before anything is started. It does not return if it restarts the command.

    Raises:
        UsageError: some tasks of the job are not on this machine.
    """
    if not engine.uses_this_machine_only:
        raise UsageError(
            "cluster.isolate works for jobs on this machine only: tasks on several hosts need each other's ports"
        )
    if not _has_network():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # execute a new program: the kernel creates a user namespace only for a process with a single thread
    os.execv(
        sys.executable,
        [
            *(sys.executable, *SAFE_MODULE, "distlaunch.agent.isolate", sys.executable),
            *readable_again(sys.orig_argv[1:]),
        ],
    )


def _has_network() -> bool:
    import psutil

    return any(
        address.family in (socket.AF_INET, socket.AF_INET6) and not is_loopback(address.address)
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
    )


def isolate_if_configured(config: RunConfig, context: LaunchContext) -> None:
    """Isolate this command if its config asks for it; see `isolate`."""
    if config.cluster.isolate:
        isolate(context.engine)
