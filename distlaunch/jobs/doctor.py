"""`distlaunch doctor`: examines the hosts of a config in the same way as the start of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distlaunch.cluster.machine import Machine
from distlaunch.engines.base import HostReport
from distlaunch.jobs.attempt import allocate_fitting, count_workers, min_workers
from distlaunch.jobs.choose_run import JobRequest, choose
from distlaunch.jobs.restarts import note_hosts
from distlaunch.plan.exposure import exposure


def examine(
    target: str, overrides: Sequence[str], machine: Machine, note: Callable[[str], None]
) -> tuple[list[HostReport], str]:
    """Examine the hosts of a config.

    Args:
        note: called with messages about progress.

    Returns:
        A report for each host, and a text about the ports that its tasks open.

    Raises:
        ConfigError: the config is wrong.
        UsageError: hosts cannot be used. The message has all problems.
    """
    choice = choose(JobRequest(target, tuple(overrides), makes_run_dir=False), machine)
    config, context = choice.config, choice.context
    note_hosts(context.engine, note)
    with context.engine as engine:
        reports = engine.examine()
        # only an allocation checks slots and ports
        allocation = allocate_fitting(count_workers(config, context), context, min_workers(config))[1]
        allocation.release()
    addresses = [place.address for place in allocation.places if place.address]
    hosts = list(dict.fromkeys(place.host for place in allocation.places if place.host))
    return reports, exposure(addresses, hosts, isolated=config.cluster.isolate)
