"""Tasks on hosts that the user can reach with ssh. Each host has an agent and one connection to it."""

from __future__ import annotations

import shlex
from pathlib import Path

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.hosts import Host, hostfile_lines, hostfile_problems, parse_host
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.ssh import Ssh
from distlaunch.engines.base import HostFiles
from distlaunch.engines.remote import ssh_errors
from distlaunch.engines.remote.engine import RemoteEngine, python_of
from distlaunch.engines.remote.link import Command

_OPTIONS = ("-T", "-x", "-o", "BatchMode=yes", "-o", "ControlMaster=no", "-o", "RemoteCommand=none",
            "-o", "ClearAllForwardings=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
            "-o", "ConnectTimeout=10")  # fmt: skip
"""Options with which ssh uses no terminal, asks no questions, shares no new connection, and ends if the network fails.
"""


def ssh_command(host: Host, settings: Ssh) -> list[str]:
    """Return the command that starts an agent. It has no details of the job, since all users can see command lines."""
    python = python_of(host, settings)
    # -P (safe path): otherwise a folder called `distlaunch` in the home directory would hide the package
    remote = f"exec {shlex.quote(python)} -P -m distlaunch.agent.remote"
    port = ["-p", str(host.port)] if host.port else []
    user = ["-l", host.user] if host.user else []
    return ["ssh", *_OPTIONS, *port, *user, "--", host.name, remote]


def hosts_of(settings: Ssh) -> tuple[Host, ...]:
    """Return the hosts that the config or its hostfile names."""
    if settings.hostfile is None:
        return tuple(parse_host(text) for text in settings.hosts)
    if problems := hostfile_problems(settings.hostfile):
        raise ConfigError([Problem(("engine", "hostfile"), problem) for problem in problems])
    return tuple(parse_host(text) for _, text in hostfile_lines(Path(settings.hostfile).read_text(encoding="utf-8")))


def ssh_engine(settings: Ssh, machine: Machine, files: HostFiles) -> RemoteEngine:
    """Return the engine of the hosts of the section `engine`."""

    def command_of(host: Host) -> Command:
        target = f"{host.user}@{host.name}" if host.user else host.name
        target += f" -p {host.port}" if host.port else ""

        def explain(stderr: str, code: int | None) -> str:
            python = python_of(host, settings)
            return ssh_errors.explain(stderr, code, target=target, name=host.name, python=python)

        return Command(ssh_command(host, settings), explain, ssh_errors.is_busy)

    return RemoteEngine("ssh", hosts_of(settings), command_of, "ssh", settings, machine, files)
