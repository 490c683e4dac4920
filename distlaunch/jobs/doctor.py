"""`distlaunch doctor`: examines the hosts of a config as a start does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlaunch.engines import engine_of
from distlaunch.engines.base import HostReport
from distlaunch.jobs.attempt import allocate_fitting, count_workers, least_workers
from distlaunch.jobs.job import JobRequest, choose


def examine(target: str, overrides: Sequence[str], environ: Mapping[str, str]) -> list[HostReport]:
    """What each host has. Raises ConfigError, UsageError with everything that is wrong."""
    config = choose(JobRequest(target, tuple(overrides)), environ).config
    engine = engine_of(config, environ)
    with engine.kept():
        reports = engine.examine(environ)
        # slots and ports, which only a start takes
        allocate_fitting(count_workers(config, environ), environ, least_workers(config))[1].release()
    return reports
