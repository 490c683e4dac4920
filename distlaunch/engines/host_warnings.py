"""Warnings about possible problems of a host. They stop no job, because its user may know better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LEAST_BYTES = 1_000_000_000
_LEAST_FILES = 1024
_LEAST_PROCESSES = 1024
"""Threads count as well, and a task of TensorFlow has some hundred on a host with many cores."""
_CLOCK_S = 5.0
"""Clock differences above this, in seconds, are warned of: times in events and logs are those of each host."""


def host_warnings(name: str, state: Mapping[str, Any], paths: Mapping[str, str], clock_s: float = 0.0) -> Iterator[str]:
    """Return the warnings about one host; each begins with its name.

    Args:
        state: see `host_state`.
        paths: the config's keys of data -> their paths.
        clock_s: how far its clock is ahead of this machine's.
    """
    for key, path in paths.items():
        if path in state["missing"]:
            yield f"{name} has no {path}, which this machine has ({key})"
    for folder, left in state["free_bytes"].items():
        if left < _LEAST_BYTES:
            yield f"{name} has {left / 1e6:,.0f} MB left on the disk of {folder}"
    if (left := state["free_memory_bytes"]) < _LEAST_BYTES:
        yield f"{name} has {left / 1e6:,.0f} MB of memory left"
    if (limit := state["open_files"]) is not None and limit < _LEAST_FILES:
        yield f"a process on {name} may open {limit} files; raise it with `ulimit -n`, or in its limits.conf"
    if (limit := state["processes"]) is not None and limit < _LEAST_PROCESSES:
        yield f"{name} allows you {limit} processes and threads; raise it with `ulimit -u`, or in its limits.conf"
    if abs(clock_s) > _CLOCK_S:
        ahead = "ahead of" if clock_s > 0 else "behind"
        yield f"the clock of {name} is {abs(clock_s):.0f} s {ahead} this machine's"


def warnings_between(drivers: Mapping[str, str], machines: Mapping[str, str]) -> Iterator[str]:
    """Return the warnings about several hosts together; see the functions below for the arguments."""
    yield from driver_warnings(drivers)
    yield from machine_warnings(machines)


def machine_warnings(machines: Mapping[str, str]) -> Iterator[str]:
    """Warn of one machine under several names, whose cores and GPUs are counted once for each name.

    Args:
        machines: host -> an identifier that is unique to the machine.
    """
    for names in _alike(machines).values():
        if len(names) > 1:
            yield f"{', '.join(names)} are one machine, whose tasks share its cores; write it once, with slots=N"


def driver_warnings(drivers: Mapping[str, str]) -> Iterator[str]:
    """Warn of GPU drivers that differ: what runs on one host may not run on another.

    Args:
        drivers: host -> version; empty: it has no GPU.
    """
    hosts = _alike(drivers)
    if len(hosts) > 1:
        yield "hosts have different GPU drivers: " + "; ".join(
            f"{version} on {', '.join(names)}" for version, names in hosts.items()
        )


def _alike(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hosts for each value that is not empty."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        if value:
            hosts.setdefault(value, []).append(host)
    return hosts
