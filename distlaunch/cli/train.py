"""`distlaunch train`: runs a config, or resumes a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import click

from distlaunch.base.errors import ExitCode, UsageError
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, JSON_EVENTS, OVERRIDES, QUIET

if TYPE_CHECKING:
    from distlaunch.jobs.job import JobRequest


@click.command("train", cls=Command)
@click.argument("target", metavar="CONFIG|RUN", type=FILE)
@OVERRIDES
@click.option("--name", help="Name of the run directory. Default: the config's.")
@click.option(
    "--resume", is_flag=True, help="Resume the newest unfinished run of this name, or do what the finished one lacks."
)
@click.option("--smoke", is_flag=True, help="Prove the config in about a minute: a few steps, a restart, an export.")
@click.option("--debug", is_flag=True, help="Train on one device in this process, so that breakpoint() works.")
@click.option("--detach", "-d", is_flag=True, help="Start the job and return; it survives a closed terminal.")
@JSON_EVENTS
@QUIET
def command(
    target: str,
    overrides: tuple[str, ...],
    name: str | None,
    resume: bool,
    smoke: bool,
    debug: bool,
    detach: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train what a config describes, with checkpoints, validation and exports.

    With --resume, a run directory may be given instead of a config; training continues from its newest good checkpoint.
    With --debug, functions run line by line in Python, data.map and data.augment included, at the same global batch
    size, in a run called NAME-debug. With --detach, the launcher writes to RUN/launcher.log; `logs`, `stop` and `runs`
    work on it.
    """
    from distlaunch.jobs import job
    from distlaunch.jobs import smoke as smoking
    from distlaunch.ui.progress.view import make_view, reporting_errors, show
    from distlaunch.ui.smoke import print_proofs

    if debug:
        others = {"--resume": resume, "--smoke": smoke, "--detach": detach, "--json": as_json, "--quiet": quiet}
        _debug(target, overrides, name, [option for option, given in others.items() if given])
    request = job.JobRequest(target, overrides, name, resume)
    if detach:
        if smoke:
            raise UsageError("--detach: --smoke takes a minute and shows its proofs here; leave one of them out")
        return _detached(request, as_json=as_json, quiet=quiet)
    view = make_view(as_json=as_json, quiet=quiet, config=target)
    if not smoke:
        return show(view, lambda: job.train(request, view, os.environ))
    with reporting_errors(view):
        proven = smoking.smoke(request, view, os.environ)
    view.report(proven.last)
    print_proofs(proven, to_stderr=as_json or quiet, only_failures=quiet)
    # an attempt may be done, and have shown less than it should
    code = proven.last.outcome.exit_code or (ExitCode.DONE if proven.passed else ExitCode.FAILED)
    view.finished(proven.last.outcome.status if proven.passed else "failed", int(code))
    return int(code)


def _debug(target: str, overrides: tuple[str, ...], name: str | None, others: list[str]) -> NoReturn:
    """Becomes the process that trains."""
    from distlaunch.jobs.debug import become_debugger

    if others:
        message = "makes a run of its own, from its start, in this terminal"
        raise UsageError(f"--debug: {message}; leave out {' and '.join(others)}")
    become_debugger(target, overrides, name, os.environ)


def _detached(request: JobRequest, *, as_json: bool, quiet: bool) -> int:
    """Starts the run here, and continues it in a process of its own."""
    from distlaunch.jobs import detach, job
    from distlaunch.ui.detach import DetachedView, print_detached
    from distlaunch.ui.progress.view import make_view

    claimed = job.begin(request, make_view(as_json=as_json, quiet=quiet), os.environ)
    if claimed is None:
        return ExitCode.DONE
    if claimed.choice.beside:
        raise UsageError("--detach: an evaluator with a launcher of its own stays where it is started; use nohup")
    # after `begin`: what is wrong with the request is reported here, in the terminal
    side = detach.leave(claimed.run.launcher_log)
    if isinstance(side, detach.Waiting):
        code = side.wait()
        if code is None and not quiet:
            print_detached(claimed.run, side.pid, as_json=as_json)
        return int(code or ExitCode.DONE)
    view = DetachedView(side.settle)
    result = job.execute(claimed, view, os.environ)
    view.report(result)
    return int(result.outcome.exit_code)
