"""The exit code of a run that has ended, from the files in its directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from distlaunch.base.errors import ExitCode
from distlaunch.base.event_files import read_all_events_of
from distlaunch.base.events import Exported, ExportFailed, JobFailed, RunEnded
from distlaunch.base.protocol import RUN_MODES
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.report import planned_mode

_FROM_WORST_TO_BEST = (ExitCode.USAGE, ExitCode.FAILED, ExitCode.TEMPORARY, ExitCode.PREEMPTED, ExitCode.DONE)


def worst_code(codes: Iterable[int]) -> int:
    """Return the worst code. From worst to best, the codes are 2, 3, 75, 4 and 0; other codes are worse than these."""
    return min(codes, key=lambda code: _FROM_WORST_TO_BEST.index(code) if code in _FROM_WORST_TO_BEST else -1)


def final_code(run: RunDir) -> int:
    """Return the exit code of a run that has ended: that of its launcher or of its submitted job."""
    attempts = [number for number in run.attempts() if planned_mode(run, number) in RUN_MODES]
    reported = run.job_exit_code()
    if reported is not None and (not attempts or _is_newer(run.batch_exit, run.events)):
        return reported
    codes: dict[int, int] = {}
    last, failed_at, exported_at = int(ExitCode.DONE), 0.0, 0.0
    # also read the events of later exports, which are in separate files
    for event in read_all_events_of(run, RunEnded, JobFailed, ExportFailed, Exported):
        match event:
            case RunEnded():
                last = codes[event.attempt] = _code_of(event.status)
            case JobFailed():
                last = codes[event.attempt] = event.exit_code
            case ExportFailed():
                failed_at = max(failed_at, event.time)
            case _:
                exported_at = max(exported_at, event.time)
    if not attempts or attempts[-1] not in codes:
        return ExitCode.TEMPORARY  # the launcher was killed before it could record the end
    return ExitCode.FAILED if last == ExitCode.DONE and failed_at > exported_at else last


def _is_newer(path: Path, other: Path) -> bool:
    try:
        return path.stat().st_mtime >= other.stat().st_mtime
    except OSError:
        return path.exists()


def _code_of(status: str) -> int:
    known = {"done": ExitCode.DONE, "stopped": ExitCode.PREEMPTED, "interrupted": ExitCode.PREEMPTED}
    return known.get(status, ExitCode.FAILED)
