"""`distlaunch tune`: measures strategies and settings on your model and data, and names the fastest."""

from __future__ import annotations

import click

from distlaunch.base.errors import ExitCode
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, OVERRIDES, Seconds


@click.command("tune", cls=Command)
@click.argument("config", metavar="CONFIG", type=FILE)
@click.option(
    "--seconds",
    type=Seconds(min=1),
    default=60.0,
    show_default=True,
    help="Budget. Candidates that do not fit into it are listed as not tried.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="TEXT",
    help="Try only candidates whose names contain TEXT, such as oneDNN or jax. May be repeated.",
)
@click.option("--allow-16-bit", is_flag=True, help="Allow 16-bit precision to win, although it changes the numbers.")
@click.option("--write", metavar="FILE", type=FILE, help="Write a copy of the config with the winner's settings.")
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="Print only the result, as JSON.")
def command(
    config: str, seconds: float, only: tuple[str, ...], allow_16_bit: bool, write: str | None,
    overrides: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Measure the config's model and data under other strategies and settings on the hosts of its engine.

    Candidates are the strategies that are possible on these hosts, and the settings XLA, oneDNN, threads and steps per
    call, first on the config's own strategy, then on the fastest. Candidates take turns in short rounds, so that other
    work on the machine slows all of them equally. After some rounds the slower half is dropped, until few are left.
    Global batch, seed, model and data stay the same. On ssh hosts, and in a Slurm allocation, candidates run on the
    hosts that the config's tasks use. If all tasks run on one host, candidates use all hosts of the engine. Candidates
    on one device use the first host.

    A candidate wins only if the range of its step times lies below that of the untuned config, and if its losses,
    metrics and weights equal those of one device by the noise rule of `verify`. Callbacks, validation and checkpoints
    do not run, and no files are left.

    The exit code is 0 even if nothing is faster, 2 if the config cannot be tuned, and 3 if it cannot be trained.
    """
    from distlaunch.cluster.machine import Machine
    from distlaunch.tune.tuning import TuneRequest, tune
    from distlaunch.tune.write import check_target, write_winner
    from distlaunch.ui import tune as shown
    from distlaunch.ui.progress.view import QuietView

    def echo(text: str) -> None:
        if not as_json:
            click.echo(text, err=True)

    if write is not None:
        check_target(write, config)
    request = TuneRequest(config, overrides, seconds, allow_16_bit, only)
    found = tune(request, Machine.here(), echo)
    if found is None:
        return int(ExitCode.DONE)
    result, choice = found
    if result.failed is not None:
        QuietView().report(result.failed)
        echo("(this log has been deleted; `distlaunch verify CONFIG --keep DIR` keeps the logs of such a trial)")
    if as_json:
        click.echo(shown.as_json(result))
    elif result.failed is None:
        click.echo("\n".join(["", *shown.table_lines(result)]))
    if result.failed is not None:
        return int(result.exit_code)
    if write is not None and result.winner is not None and result.interrupted is None:
        write_winner(config, write, choice.context.machine.environ, result, shown.export_lines(result.winner.candidate))
        echo(f"wrote {write}")
    elif write is not None:
        echo(f"--write: {write} was not written, since the search did not reach its end; run the command again")
    return int(result.exit_code) if result.exit_code else int(ExitCode.DONE)
