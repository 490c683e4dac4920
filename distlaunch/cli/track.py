"""`distlaunch track`: sends the values of a run to experiment trackers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import click

from distlaunch.cli.exit_codes import Command, ExitCode
from distlaunch.cli.options import RunPath

if TYPE_CHECKING:
    from distlaunch.config.run import TrackerName


_NAMES = ("wandb", "mlflow", "trackio", "tensorboard")  # importing them from the config would delay `--help`


@click.command("track", cls=Command)
@click.argument("run", metavar="RUN", type=RunPath())
@click.argument("trackers", metavar="[TRACKER]...", nargs=-1, type=click.Choice(_NAMES))
def command(run: str, trackers: tuple[str, ...]) -> int:
    """Send the values of a run to the given trackers, or to those in `tracking` of its config.

    Sends only the values that a tracker does not have yet, such as those that the run could not send. While a run
    sends its values to a tracker itself, this command sends nothing to that tracker.
    """
    from distlaunch.base.errors import UsageError
    from distlaunch.config.read.load import load_resolved
    from distlaunch.jobs.tracking import track_now
    from distlaunch.runs.find import open_run
    from distlaunch.runs.tracking.outcome import SendOutcome
    from distlaunch.runs.tracking.trackers import is_installed
    from distlaunch.ui.plain import echo, echo_error

    found = open_run(run)
    names = cast("tuple[TrackerName, ...]", trackers) or tuple(load_resolved(found.config).tracking)
    if not names:
        raise UsageError("the run's config has no `tracking`; name a tracker, such as `distlaunch track RUN mlflow`")
    for name in names:
        if not is_installed(name):
            raise UsageError(f"{name} is not installed; pip install 'distlaunch[{name}]'")
    results = track_now(found, names, os.environ)
    problems = [each.problem for each in results if each.problem]
    for problem in problems:
        echo_error(f"error: {problem}")
    for outcome, words in ((SendOutcome.SENT, "sent to"), (SendOutcome.NOTHING_NEW, "nothing new to send to")):
        if reached := [each.name for each in results if each.outcome is outcome]:
            echo(f"{words} {', '.join(reached)}")
    for each in results:
        if each.outcome is SendOutcome.BUSY:
            echo(f"{each.name} already gets the values from another process, such as the run itself while it trains")
    return ExitCode.FAILED if problems else ExitCode.DONE
