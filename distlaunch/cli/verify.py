"""`distlaunch verify`: checks that each strategy gives the same numbers as one device."""

from __future__ import annotations

import click

from distlaunch.base.errors import ExitCode
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, FOLDER, OVERRIDES


def _parse_kinds(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    from distlaunch.verify.trials import KINDS

    if value is None:
        return KINDS
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    for name in names:
        if name not in KINDS:
            raise click.BadParameter(f"got '{name}'; expected some of {', '.join(KINDS)}, separated by commas")
    if not names:
        raise click.BadParameter(f"got nothing; expected some of {', '.join(KINDS)}, separated by commas")
    return names


def _parse_replicas(context: click.Context, option: click.Parameter, value: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not numbers or not all(number.isdecimal() and int(number) > 1 for number in numbers):
        raise click.BadParameter(f"got '{value}'; expected numbers above 1, separated by commas, such as 2,4")
    return tuple(map(int, numbers))


@click.command("verify", cls=Command)
@click.argument("config", metavar="CONFIG", type=FILE)
@click.option("--steps", type=click.IntRange(min=2), default=30, show_default=True, help="Steps in each trial.")
@click.option(
    "--strategies",
    "kinds",
    callback=_parse_kinds,
    metavar="KIND,...",
    help="Strategies to try. Default: all but one_device.",
)
@click.option(
    "--replicas",
    callback=_parse_replicas,
    default="2,4",
    show_default=True,
    metavar="N,...",
    help="Numbers of replicas to try.",
)
@OVERRIDES
@click.option(
    "--keep", metavar="DIR", type=FOLDER, help="Keep the configs, logs and records of all trials in this new directory."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the table, as JSON.")
def command(
    config: str,
    steps: int,
    kinds: tuple[str, ...],
    replicas: tuple[int, ...],
    overrides: tuple[str, ...],
    keep: str | None,
    as_json: bool,
) -> int:
    """Train the config's model on its data for a few steps under each strategy, and compare with one device.

    All trials start from the same weights. Loss, metrics and gradients of each step and the final weights may deviate
    by 1e-5, or by ten times the rounding noise of the model up to that step. The noise is measured first. If the cause
    of a deviation is known, it is explained. Trials run one after the other on this machine and leave no files.

    Random layers such as Dropout stay on, since each example keeps its mask under every strategy. Callbacks and
    validation do not run. A difference that the documentation explains, such as that of sparse gradients on a mesh, has
    the verdict "differs as documented".

    The exit code is 0 if all compared strategies are equal, 1 if some differ, 2 if nothing could be compared, and 3 if
    the trial on one device failed.
    """
    from distlaunch.cluster.machine import Machine
    from distlaunch.ui import verify as shown
    from distlaunch.ui.progress.view import QuietView
    from distlaunch.verify.comparison import VerifyRequest, verify

    def echo(text: str) -> None:
        if not as_json:
            click.echo(text, err=True)

    request = VerifyRequest(config, overrides, steps, kinds, replicas, keep)
    result = verify(request, Machine.here(), lambda row: echo(shown.row_line(row)), echo)
    if result.failed is not None:
        QuietView().report(result.failed)
        if keep is None:
            echo("(this log has been deleted; use --keep DIR to keep the logs of all trials)")
    if as_json:
        click.echo(shown.as_json(result))
    elif result.failed is None and (result.rows or result.interrupted is None):
        click.echo("\n".join(["", *shown.table_lines(result)]))
    return int(result.exit_code) if result.exit_code else int(ExitCode.DONE)
