"""The ports that the tasks of a plan open, and who reaches them: anyone who does can do what the tasks can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distlaunch.base.plural import listed

_NO_LOGIN = "TensorFlow and JAX ask nobody who connects for a password"


def exposure(addresses: Iterable[str], hosts: Sequence[str], *, isolated: bool) -> str:
    """Return a sentence on the ports of tasks.

    Args:
        addresses: of the tasks that others connect to.
        hosts: names of the hosts that they run on; empty: this machine.
        isolated: see `cluster.isolate`.
    """
    # a port that is picked at the start has words in its place
    ports = list(dict.fromkeys(address.rpartition(":")[2].strip("()") for address in addresses))
    if not ports:
        return "none: no task connects to another"
    shown = _ranges(ports)
    if isolated:
        return f"{shown}, which only tasks of this job reach (cluster.isolate)"
    if hosts:
        return (
            f"{shown} on {listed(list(hosts))}, open to the users of these hosts and to every host that reaches them: "
            f"{_NO_LOGIN}"
        )
    return (
        f"{shown}, open to the users of this machine and to every host that reaches it: {_NO_LOGIN}; "
        "`cluster: {isolate: true}` closes them"
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
