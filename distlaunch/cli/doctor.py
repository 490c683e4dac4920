"""`distlaunch doctor`: looks at the hosts of a config, and starts nothing on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from distlaunch.cli.options import OVERRIDES

if TYPE_CHECKING:
    from distlaunch.engines.base import HostReport

_CLOCK_S = 5.0
"""By so much clocks may differ before it is worth a word: times in events and logs are each host's own."""


@click.command("doctor")
@click.argument("config", metavar="CONFIG")
@OVERRIDES
def command(config: str, overrides: tuple[str, ...]) -> None:
    """Check what a start checks on each host of a config, all at once: login, versions, code, and who reaches whom.

    Exits with 2 if something is wrong.
    """
    from distlaunch.jobs.doctor import examine

    _print_hosts(examine(config, overrides, os.environ))


def _print_hosts(hosts: Sequence[HostReport]) -> None:
    """One line a host, and what is worth a word."""
    rows = [("host", "address", "Python", "TensorFlow", "JAX", "cores", "memory", "GPUs")]
    rows += [
        (host.name, host.address, host.python, host.packages.get("tensorflow", "-"), host.packages.get("jax", "-"),
         str(host.cores), f"{host.memory_bytes / 1e9:.0f} GB", str(len(host.gpus)))
        for host in hosts
    ]  # fmt: skip
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    for host in hosts:
        if abs(host.clock_s) > _CLOCK_S:
            ahead = "ahead of" if host.clock_s > 0 else "behind"
            click.echo(f"warning: the clock of {host.name} is {abs(host.clock_s):.0f} s {ahead} this machine's")
    reach = " and reach each other" if len(hosts) > 1 else ""
    click.echo(f"ok: {len(hosts)} host{'s' * (len(hosts) != 1)} can be used{reach}")
