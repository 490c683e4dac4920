"""Writes the `report.html` of a run at the run's end, in a child process whose failure never fails the run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Generator, Mapping

from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.run_dir import RunDir

REPORT = "DISTLAUNCH_REPORT"
"""Environment variable; with `off`, no page is written at the end of a run."""
_DEADLINE_S = 20.0
"""Less than a scheduler grants to a job that it ends."""


@contextlib.contextmanager
def leaving_page(run: RunDir, environ: Mapping[str, str]) -> Generator[None]:
    """Write the page of a run on exit, however the run ends."""
    try:
        yield
    finally:
        write_page_in_child(run, environ)


def write_page_in_child(run: RunDir, environ: Mapping[str, str]) -> None:
    """Write the page if the run has written anything and DISTLAUNCH_REPORT is not `off`.

    If it cannot be written, print how to write it, since an earlier page may be left. That command shows the error.
    """
    if environ.get(REPORT) == "off" or not run.exists():
        return
    is_written = False
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        child = subprocess.run(
            [sys.executable, *SAFE_MODULE, "distlaunch.ui.html_report", str(run.path)],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_DEADLINE_S,
            # Ctrl-C in the terminal ends the run, not its report
            start_new_session=True,
        )
        is_written = child.returncode == 0
    if not is_written:
        print(f"{run.report.name} was not written; try `distlaunch report {run.path} --html`", file=sys.stderr)
