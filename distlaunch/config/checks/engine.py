"""Checks of `engine:`: hosts are written as hosts, and there are some."""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.base.errors import Problem
from distlaunch.cluster.hosts import EXAMPLE, hosts_problems
from distlaunch.config.run import RunConfig


def hosts_are_named(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """`ssh` needs hosts, from one place."""
    engine = config.engine
    if engine.hosts and engine.hostfile is not None:
        yield Problem(("engine", "hostfile"), "got both 'hosts' and 'hostfile'; expected one of them; remove one")
    if engine.kind == "ssh" and not engine.hosts and engine.hostfile is None:
        yield Problem(("engine",), f"`kind: ssh` without hosts; add `hosts: [...]` or `hostfile: PATH`; {EXAMPLE}")
    if engine.kind == "auto" and (engine.hosts or engine.hostfile is not None):
        name = "hosts" if engine.hosts else "hostfile"
        yield Problem(("engine", name), f"`kind: auto` uses no {name}; write `kind: ssh`, or remove the {name}")
    for number, message in hosts_problems(engine.hosts):
        yield Problem(("engine", "hosts", number), message)
    for name in ("python", "folder"):
        path = getattr(engine, name)
        if path is not None and not path.startswith("/"):
            yield Problem(("engine", name), f"got {path!r}; expected an absolute path, which is the same on all hosts")


def isolated_jobs_are_here(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """A job with a network of its own is on this machine alone."""
    if config.cluster.isolate and not config.engine.is_here:
        message = "hides the ports of jobs on this machine"
        got = f"but `engine.kind: {config.engine.kind}` has tasks on several hosts; remove one of them"
        yield Problem(("cluster", "isolate"), f"{message}, {got}")
