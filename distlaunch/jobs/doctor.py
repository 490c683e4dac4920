"""`distlaunch doctor`: examines the hosts of a config as a start does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distlaunch.engines import engine_of
from distlaunch.engines.base import HostReport
from distlaunch.jobs.attempt import allocate_fitting, count_workers, least_workers
from distlaunch.jobs.job import JobRequest, choose
from distlaunch.jobs.restarts import note_hosts


def examine(
    target: str, overrides: Sequence[str], environ: Mapping[str, str], note: Callable[[str], None]
) -> list[HostReport]:
    """What each host has. Raises ConfigError, UsageError with everything that is wrong.

    Args:
        note: takes lines on what is waited for.
    """
    config = choose(JobRequest(target, tuple(overrides), makes_run=False), environ).config
    engine = engine_of(config, environ)
    note_hosts(engine, note)
    with engine.kept():
        reports = engine.examine(environ)
        # slots and ports, which only a start takes
        allocate_fitting(count_workers(config, environ), environ, least_workers(config))[1].release()
    return reports
