"""`distlaunch doctor`: checks the hosts of a config without starting tasks on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from distlaunch.base.plural import count
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, OVERRIDES
from distlaunch.ui.plain import echo

if TYPE_CHECKING:
    from distlaunch.engines.base import HostReport
    from distlaunch.jobs.doctor import Examination


@click.command("doctor", cls=Command)
@click.argument("config", metavar="CONFIG", type=FILE)
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check all hosts of a config in the same way as a job does: login, versions, code, ports, connections.

    Warns of missing data, little disk space or memory, low limits, and clocks and drivers that differ. Shows which
    hardware differs, and the environment variables that tasks of a new run get because of the hardware. Exits with 2 if
    a host cannot be used, and with 75 if a host does not answer.
    """
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs.doctor import examine

    found = examine(config, overrides, Machine.here(), lambda text: echo(text, err=as_json))
    if as_json:
        plain = {
            "hosts": [{**dataclasses.asdict(host), "hardware": host.hardware._asdict()} for host in found.hosts],
            "ports": found.ports,
            "settings": found.settings.to_plain(),
            "differences": found.differences,
            "warnings": _warnings_between(found.hosts),
        }
        click.echo(json.dumps(plain, indent=2))
    else:
        _print_hosts(found)


def _warnings_between(hosts: Sequence[HostReport]) -> list[str]:
    """Return warnings about several hosts together."""
    from distlaunch.engines.host_warnings import warnings_between

    return list(
        warnings_between({host.name: host.driver for host in hosts}, {host.name: host.machine for host in hosts})
    )


def _print_hosts(found: Examination) -> None:
    """Print one line for each host, the ports and settings of the tasks, differences between hosts, and warnings."""
    from distlaunch.plan.train import settings_lines
    from distlaunch.ui import words

    hosts = found.hosts
    rows = [("host", "address", "Python", "TensorFlow", "JAX", "CPU", "cores", "memory", "disk left", "GPUs", "driver")]
    rows += [
        (host.name, host.address, host.python, host.packages.get("tensorflow", "-"), host.packages.get("jax", "-"),
         host.hardware.cpu, str(host.cores), words.size(host.memory_bytes), words.size(host.free_bytes),
         str(len(host.gpus)), host.driver)
        for host in hosts
    ]  # fmt: skip
    # leave out empty columns
    kept = [number for number in range(len(rows[0])) if any(row[number] for row in rows[1:])]
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    for row in rows:
        echo("  ".join(row[number].ljust(widths[number]) for number in kept).rstrip())
    echo(f"ports: {found.ports}")
    for line in [*settings_lines(found.settings), *found.differences]:
        echo(line)
    for warning in [*(warning for host in hosts for warning in host.warnings), *_warnings_between(hosts)]:
        echo(f"warning: {warning}")
    reach = " and reach each other" if len(hosts) > 1 else ""
    echo(f"ok: {count(len(hosts), 'host')} can be used{reach}")
