"""`distlaunch doctor`: looks at the hosts of a config, and starts nothing on them."""

from __future__ import annotations

import os

import click

from distlaunch.cli.options import OVERRIDES


@click.command("doctor")
@click.argument("config", metavar="CONFIG")
@OVERRIDES
def command(config: str, overrides: tuple[str, ...]) -> None:
    """Check what a start checks on each host of a config, all at once: login, versions, code, and who reaches whom.

    Exits with 2 if something is wrong.
    """
    from distlaunch.jobs.doctor import examine
    from distlaunch.ui.doctor import print_hosts

    print_hosts(examine(config, overrides, os.environ))
