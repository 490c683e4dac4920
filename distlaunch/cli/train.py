"""`distlaunch train`: runs a config, or goes on with a run."""

from __future__ import annotations

import os

import click

from distlaunch.cli.options import JSON_EVENTS, OVERRIDES, QUIET
from distlaunch.errors import ExitCode


@click.command("train")
@click.argument("target", metavar="CONFIG|RUN")
@OVERRIDES
@click.option("--name", help="Name of the run directory, instead of the config's.")
@click.option(
    "--resume", is_flag=True, help="Go on with the newest run of this config that is not finished, or had fewer epochs."
)
@click.option("--smoke", is_flag=True, help="Prove the config in under a minute: a few steps, a restart, an export.")
@JSON_EVENTS
@QUIET
def command(
    target: str, overrides: tuple[str, ...], name: str | None, resume: bool, smoke: bool, as_json: bool, quiet: bool
) -> int:
    """Run a config: train, evaluate, checkpoint, export.

    With --resume, RUN may be a run directory, whose training then goes on from its newest good checkpoint.
    Exit codes: 0 done, 2 bad usage or config, 3 a task failed, 4 stopped with a checkpoint, 130 interrupted.
    """
    from distlaunch.launch import job
    from distlaunch.launch import smoke as smoking
    from distlaunch.ui.smoke import print_proofs
    from distlaunch.ui.view import finish_output, make_view

    view = make_view(as_json=as_json, quiet=quiet)
    request = job.Request(target, overrides, name, resume)
    if smoke:
        proven = smoking.smoke(request, view, os.environ)
        view.report(proven.last)
        print_proofs(proven, to_stderr=as_json or quiet, only_failures=quiet)
        code = proven.last.outcome.exit_code or (ExitCode.DONE if proven.passed else ExitCode.FAILED)
    else:
        result = job.train(request, view, os.environ)
        code = ExitCode.DONE if result is None else result.outcome.exit_code
        if result is not None:
            view.report(result)
    finish_output()
    return int(code)
