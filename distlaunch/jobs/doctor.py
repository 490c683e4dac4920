"""`distlaunch doctor`: examines the hosts of a config as a start does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distlaunch.cluster.machine import Machine
from distlaunch.engines.base import HostReport
from distlaunch.jobs.attempt import allocate_fitting, count_workers, least_workers
from distlaunch.jobs.choose_run import JobRequest, choose
from distlaunch.jobs.restarts import note_hosts
from distlaunch.plan.exposure import exposure


def examine(
    target: str, overrides: Sequence[str], machine: Machine, note: Callable[[str], None]
) -> tuple[list[HostReport], str]:
    """Return what each host has, and which ports its tasks open to whom.

    Raises ConfigError, UsageError with everything that is wrong.

    Args:
        note: called with lines about what is being waited for.
    """
    choice = choose(JobRequest(target, tuple(overrides), makes_run=False), machine)
    config, context = choice.config, choice.context
    note_hosts(context.engine, note)
    with context.engine as engine:
        reports = engine.examine()
        # slots and ports, which only a start takes
        allocation = allocate_fitting(count_workers(config, context), context, least_workers(config))[1]
        allocation.release()
    addresses = [place.address for place in allocation.places if place.address]
    hosts = list(dict.fromkeys(place.host for place in allocation.places if place.host))
    return reports, exposure(addresses, hosts, isolated=config.cluster.isolate)
