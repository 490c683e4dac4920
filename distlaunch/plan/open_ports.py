"""Describes the ports that the tasks of a plan open and who can reach them.

Anyone who can reach the ports can control the tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distlaunch.base.plural import listed

_NO_LOGIN = "TensorFlow and JAX do not authenticate connections"


def describe_ports(addresses: Iterable[str], hosts: Sequence[str], *, isolated: bool) -> str:
    """Return a sentence on the ports of tasks.

    Args:
        addresses: addresses of the tasks to which others connect.
        hosts: names of the hosts of these tasks; empty for this machine.
        isolated: see `cluster.isolate`.
    """
    # a port that is picked at the start has a text instead of a number
    ports = list(dict.fromkeys(address.rpartition(":")[2].strip("()") for address in addresses))
    if not ports:
        return "none: no task connects to another"
    shown = _ranges(ports)
    if isolated:
        return f"{shown}, reachable only by tasks of this job (cluster.isolate)"
    if hosts:
        return (
            f"{shown} on {listed(list(hosts))}, open to users of these hosts and to all hosts that can reach them: "
            f"{_NO_LOGIN}"
        )
    return (
        f"{shown}, open to users of this machine and to all hosts that can reach it: {_NO_LOGIN}; "
        "use `cluster: {isolate: true}` to close them"
    )


def _ranges(ports: Sequence[str]) -> str:
    """Return ports as ranges: `5001-5003, 6000`."""
    known = sorted(int(port) for port in ports if port.isdigit())
    parts, start = list[str](), 0
    for end, port in enumerate(known, 1):
        if end == len(known) or known[end] != port + 1:
            parts.append(str(port) if end - start == 1 else f"{known[start]}-{port}")
            start = end
    return ", ".join([*parts, *(port for port in ports if not port.isdigit())])
