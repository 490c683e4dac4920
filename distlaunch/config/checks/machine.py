"""What only this machine can tell about a config, now: free ports, a place for the run directory."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from distlaunch.base.errors import Problem
from distlaunch.config.run import RunConfig


def machine_problems(config: RunConfig) -> list[Problem]:
    """What would keep a run of this config from starting here."""
    return [*busy_ports(config), *runs_dir_problems(config)]


def busy_ports(config: RunConfig) -> Iterator[Problem]:
    """Fixed ports that another process holds."""
    if config.cluster.ports == "auto":
        return
    for index, port in enumerate(config.cluster.ports):
        reason = _bind(port)
        if reason is not None:
            key = ("cluster", "ports", index)
            yield Problem(key, f"port {port} on this machine: {reason}; choose another one, or write `ports: auto`")


def _bind(port: int) -> str | None:
    """Why a port cannot be used, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as servers do: a port whose last connection has just closed is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            known = {errno.EADDRINUSE: "another process uses it", errno.EACCES: "only root may use it"}
            return known.get(error.errno or 0, error.strerror or str(error))
    return None


def runs_dir_problems(config: RunConfig) -> Iterator[Problem]:
    """The run directory can be made, or its parents can."""
    folder = Path(config.runs_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        message = f"got {config.runs_dir!r}, but {existing} is a file; expected a folder; choose another one"
        yield Problem(("runs_dir",), message)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(
            ("runs_dir",), f"got {config.runs_dir!r}, but {existing} may not be written; choose another folder"
        )
