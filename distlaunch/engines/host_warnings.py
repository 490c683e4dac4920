"""Warnings about possible problems of a host. They do not stop a job, since its user may know better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distlaunch.cluster.hardware import DECIDED, Hardware

_MIN_FREE_BYTES = 1_000_000_000
_MIN_OPEN_FILES = 1024
_MIN_PROCESSES = 1024
"""Smallest limit on processes without a warning. The limit includes threads, and a TensorFlow task has hundreds of them
on a host with many cores."""
_MAX_CLOCK_DIFFERENCE_S = 5.0
"""Largest difference of clocks without a warning. Differences matter, since events and logs have the times of their
hosts."""


def host_warnings(name: str, state: Mapping[str, Any], paths: Mapping[str, str], clock_s: float = 0.0) -> Iterator[str]:
    """Yield the warnings about one host; each begins with its name.

    Args:
        state: see `host_state`.
        paths: data paths by config key.
        clock_s: seconds by which the host's clock is ahead of this machine's clock.
    """
    for key, path in paths.items():
        if path in state["missing"]:
            yield f"{name} has no {path}, which this machine has ({key})"
    for folder, left in state["free_bytes"].items():
        if left < _MIN_FREE_BYTES:
            yield f"{name} has {left / 1e6:,.0f} MB left on the disk of {folder}"
    if (left := state["free_memory_bytes"]) < _MIN_FREE_BYTES:
        yield f"{name} has {left / 1e6:,.0f} MB of memory left"
    if (limit := state["open_files"]) is not None and limit < _MIN_OPEN_FILES:
        yield f"a process on {name} may open {limit} files; raise it with `ulimit -n`, or in its limits.conf"
    if (limit := state["processes"]) is not None and limit < _MIN_PROCESSES:
        yield f"{name} allows you {limit} processes and threads; raise it with `ulimit -u`, or in its limits.conf"
    if abs(clock_s) > _MAX_CLOCK_DIFFERENCE_S:
        ahead = "ahead of" if clock_s > 0 else "behind"
        yield f"the clock of {name} is {abs(clock_s):.0f} s {ahead} this machine's"


def warnings_between(drivers: Mapping[str, str], machines: Mapping[str, str]) -> Iterator[str]:
    """Yield the warnings about several hosts together; see the functions below for the arguments."""
    yield from driver_warnings(drivers)
    yield from machine_warnings(machines)


def machine_warnings(machines: Mapping[str, str]) -> Iterator[str]:
    """Warn if several host names are the same machine, since its cores and GPUs are counted once for each name.

    Args:
        machines: an identifier unique to the machine, by host.
    """
    for names in _group_by_value(machines).values():
        if len(names) > 1:
            yield f"{', '.join(names)} are the same machine, so their tasks share its cores; list it once, with slots=N"


def driver_warnings(drivers: Mapping[str, str]) -> Iterator[str]:
    """Warn if GPU drivers differ, since code that runs on one host may not run on another.

    Args:
        drivers: the version of the driver by host; empty for a host without GPUs.
    """
    hosts = _group_by_value(drivers)
    if len(hosts) > 1:
        yield "hosts have different GPU drivers: " + "; ".join(
            f"{version} on {', '.join(names)}" for version, names in hosts.items()
        )


def hardware_differences(hardware: Mapping[str, Hardware]) -> Iterator[str]:
    """Yield a sentence for each fact that differs between hosts and decides a setting of their tasks."""
    facts: dict[str, dict[str, str]] = {
        "CPUs": {name: each.cpu or each.architecture for name, each in hardware.items()},
        "features of the CPU": {name: ", ".join(each.features) or "none" for name, each in hardware.items()},
        "numbers of cores": {name: str(each.num_cores) for name, each in hardware.items()},
        "NUMA nodes": {name: str(max(1, len(each.numa_nodes))) for name, each in hardware.items()},
        "numbers of GPUs": {name: str(len(each.gpus)) for name, each in hardware.items()},
    }
    for variable in DECIDED:
        set_there = {name: each.environ.get(variable, "not set") for name, each in hardware.items()}
        facts[f"values of {variable} in their environments"] = set_there
    for what, values in facts.items():
        hosts = _group_by_value(values)
        if len(hosts) > 1:
            each = "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
            yield f"hosts have different {what}: {each}"


def _group_by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hosts for each value that is not empty."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        if value:
            hosts.setdefault(value, []).append(host)
    return hosts
