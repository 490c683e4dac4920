"""`distlaunch run`: runs a script as the tasks of a cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from distlaunch.base.errors import UsageError
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, JSON_EVENTS, QUIET, Seconds

if TYPE_CHECKING:
    from distlaunch.jobs.script import ScriptRequest
    from distlaunch.ui.progress.view import View

_COUNT = click.IntRange(min=1)
_SECONDS = Seconds(min=0, min_open=True)


@click.command("run", cls=Command, context_settings={"allow_interspersed_args": False})
@click.option("--workers", type=_COUNT, metavar="N", help="Number of workers. Default: 1.")
@click.option("--ps", type=_COUNT, metavar="N", help="Number of parameter servers. Adds a chief, the coordinator.")
@click.option("--chief", is_flag=True, help="Add a task `chief`; without it, worker 0 leads.")
@click.option("--evaluator", is_flag=True, help="Add a task `evaluator`.")
@click.option("--jax", is_flag=True, help="Set up jax.distributed.initialize() instead of TF_CONFIG.")
@click.option("--hosts", "-H", metavar="LIST", help="Run on these hosts, over ssh: a,user@b,'c slots=2'.")
@click.option("--hostfile", metavar="FILE", type=FILE, help="Run on the hosts of this file, one per line.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of engine, e.g. --set engine.sync=code."
)
@click.option("--isolate", is_flag=True, help="Hide the tasks' ports from other hosts; tasks reach only each other.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.option("--name", help="Name of the run directory. Default: the script's.")
@click.option("--runs-dir", default="runs", show_default=True, help="Folder for run directories.")
@click.option(
    "--restarts", type=click.IntRange(min=0), metavar="N", help="Restarts after failures. Default: 0, or 3 with --ps."
)
@click.option("--window", type=_SECONDS, metavar="S", help="Count only restarts within this many seconds.")
@click.option(
    "--backoff",
    type=Seconds(min=0),
    default=0.0,
    metavar="S",
    help="Wait this long before a restart, doubled each time.",
)
@click.option(
    "--start-timeout",
    type=_SECONDS,
    default=300.0,
    show_default=True,
    metavar="S",
    help="How long a task may take to open its port after other tasks have opened theirs.",
)
@click.option(
    "--stop-timeout", type=_SECONDS, default=30.0, show_default=True, metavar="S", help="Time from SIGTERM to SIGKILL."
)
@click.option(
    "--stall-timeout",
    type=_SECONDS,
    default=1800.0,
    show_default=True,
    metavar="S",
    help="How long a process may be frozen or suspended. A script that waits in its own code is not detected.",
)
@JSON_EVENTS
@QUIET
@click.argument("program", metavar="SCRIPT", type=FILE)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    workers: int | None,
    ps: int | None,
    chief: bool,
    evaluator: bool,
    jax: bool,
    hosts: str | None,
    hostfile: str | None,
    overrides: tuple[str, ...],
    isolate: bool,
    module: bool,
    name: str | None,
    runs_dir: str,
    restarts: int | None,
    window: float | None,
    backoff: float,
    start_timeout: float,
    stop_timeout: float,
    stall_timeout: float,
    as_json: bool,
    quiet: bool,
    program: str,
    arguments: tuple[str, ...],
) -> int:
    """Run a TensorFlow or JAX script as a cluster of tasks.

    SCRIPT is a Python script (.py), a module with -m, or any program. All arguments after it are passed to it. Each
    task gets TF_CONFIG or, with --jax, the variables that jax.distributed.initialize() reads. When a task fails, all
    tasks end, and the first failure is reported. With --ps, a killed worker is restarted alone. A restart starts the
    script again, which must resume from its own checkpoints. The script's environment has DISTLAUNCH_ATTEMPT (0, 1,
    ...), DISTLAUNCH_RUN_DIR and DISTLAUNCH_TASK (worker:1).
    """
    from distlaunch.config.read.engine_options import load_engine
    from distlaunch.config.run import AUTO_RESTARTS
    from distlaunch.jobs import script
    from distlaunch.jobs.restarts import Limits
    from distlaunch.plan.script import ScriptJob
    from distlaunch.ui.progress.view import make_view

    _check(workers, ps, jax=jax, others={"--ps": bool(ps), "--chief": chief, "--evaluator": evaluator})
    engine = load_engine(hosts, hostfile, overrides, os.environ)
    job = ScriptJob(
        *script.find_program(program, module=module),
        *(arguments, workers or 1, ps or 0, chief, evaluator, jax),
        *(start_timeout, stop_timeout, stall_timeout),
    )
    max_restarts = restarts if restarts is not None else AUTO_RESTARTS if ps else 0
    request = script.ScriptRequest(job, Limits(max_restarts, window, backoff), engine, runs_dir, name, isolate)
    return _run(request, make_view(as_json=as_json, quiet=quiet, config=program))


def _run(request: ScriptRequest, view: View) -> int:
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs.script import run_script
    from distlaunch.ui.progress.view import show

    return show(view, lambda: run_script(request, view, Machine.here(), view.begin))


def _check(workers: int | None, ps: int | None, *, jax: bool, others: dict[str, bool]) -> None:
    if jax and (given := [name for name, is_given in others.items() if is_given]):
        raise UsageError(f"--jax: JAX has workers only; leave out {', '.join(given)}")
    if ps and workers is None:
        raise UsageError("--ps: parameter servers need workers; add --workers N")
