"""Waits until runs have ended, across restarts and requeues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.batch.job_states import JobWatch
from distlaunch.runs.final_code import final_code

_POLL_INTERVAL_S = 0.25


def wait_for_runs(
    runs: Sequence[RunDir], note: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> Iterator[tuple[RunDir, int]]:
    """Yield each run and its exit code as soon as no launcher holds it and no job for it waits or runs.

    Args:
        note: shows a message about a submitted job.
        pause: waits the given seconds.
    """
    left = {run.path: (run, _watch(run, note)) for run in runs}
    while left:
        for path, (run, watch) in list(left.items()):
            # check the job before the launcher: a job that has just started has a launcher
            if not (watch is not None and watch.is_active()) and not run.is_busy():
                del left[path]
                yield run, final_code(run)
        if left:
            pause(_POLL_INTERVAL_S)


def _watch(run: RunDir, note: Callable[[str], None]) -> JobWatch | None:
    job = run.submission()
    return None if job is None else JobWatch(run, job, note)
