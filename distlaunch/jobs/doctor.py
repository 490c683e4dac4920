"""`distlaunch doctor`: examines the hosts of a config in the same way as the start of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import RunSettings
from distlaunch.engines.base import HostReport
from distlaunch.engines.host_warnings import hardware_differences
from distlaunch.jobs.attempt import allocate_fitting, count_workers, fit_to_allocation, min_workers, plan_allocated
from distlaunch.jobs.choose_run import JobRequest, choose
from distlaunch.jobs.restarts import note_hosts
from distlaunch.plan.open_ports import describe_ports


@dataclass(frozen=True)
class Examination:
    """The result of examining the hosts of a config.

    Attributes:
        ports: a text about the ports that its tasks open.
        settings: the variables that tasks of a new run would get; see `cluster.settings`.
        differences: sentences on hardware that differs between hosts.
    """

    hosts: list[HostReport]
    ports: str
    settings: RunSettings
    differences: list[str]


def examine(target: str, overrides: Sequence[str], machine: Machine, note: Callable[[str], None]) -> Examination:
    """Examine the hosts of a config.

    Args:
        note: called with messages about progress.

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
        config, allocation = allocate_fitting(count_workers(config, context), context, min_workers(config))
        allocation.release()
    addresses = [place.address for place in allocation.places if place.address]
    hosts = list(dict.fromkeys(place.host for place in allocation.places if place.host))
    config = fit_to_allocation(config, allocation)
    settings = plan_allocated(config, choice.target_run_dir, 0, "train", allocation).settings
    differences = list(hardware_differences({report.name: report.hardware for report in reports}))
    ports = describe_ports(addresses, hosts, isolated=config.cluster.isolate)
    return Examination(reports, ports, settings, differences)
