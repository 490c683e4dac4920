"""Messages about a submitted job."""

from __future__ import annotations

import json

import click

from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.batch.submit import Submitted
from distlaunch.runs.paths import display_path
from distlaunch.ui.plain import echo, echo_error

_LAST_LINES = 20


def print_submitted(submitted: Submitted, *, as_json: bool) -> None:
    """Print the run on standard output, for scripts, and commands for the run on standard error."""
    run, job = submitted.run, submitted.job
    where = display_path(run.path)
    if as_json:
        script = str(run.batch_script)
        click.echo(json.dumps({"run": str(run.path), "engine": job.engine, "job": job.job, "script": script}))
        return
    click.echo(where)
    echo(f"job        {job.job}\nscript     {display_path(run.batch_script)}", err=True)
    echo(_commands(where), err=True)


def print_nothing_submitted(run: RunDir) -> None:
    """Print the JSON form of a run for which nothing is left to do."""
    click.echo(json.dumps({"run": str(run.path), "engine": None, "job": None, "script": None}))


def print_job_continues(submitted: Submitted) -> None:
    """Print after Ctrl-C that the job continues."""
    echo(f"job {submitted.job.job} continues", err=True)
    echo(_commands(display_path(submitted.run.path)), err=True)


def print_log(run: RunDir, begin: int) -> None:
    """Print the last lines that the job has written since a position."""
    try:
        text = run.launcher_log.read_bytes()[begin:].decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines()[-_LAST_LINES:]:
        echo_error(line)


def _commands(where: str) -> str:
    return f"follow it  distlaunch logs {where} -f\nstop it    distlaunch stop {where}"
