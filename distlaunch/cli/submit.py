"""`distlaunch submit`: submits a run to a scheduler's queue."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import click

from distlaunch.base.errors import ConfigError, ExitCode, UsageError
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.logs import wait_a_moment
from distlaunch.cli.options import FILE, METRICS_FILE, METRICS_PORT, OVERRIDES, QUIET
from distlaunch.config.read.scalars import escape

if TYPE_CHECKING:
    from distlaunch.jobs.batch.submit import Submitted

_JOB = {
    "account": ("-A", "TEXT", "Account to charge."),
    "partition": ("-p", "TEXT", "Partition of the nodes."),
    "qos": ("", "TEXT", "Quality of service."),
    "time": ("-t", "TIME", "Time limit: minutes, H:MM:SS, D-HH or D-HH:MM:SS."),
    "nodes": ("-N", "N", "Default: as many as the workers need."),
    "gpus": ("-G", "[TYPE:]N", "GPUs of each node."),
    "cpus": ("-c", "N", "Cores of each node."),
    "mem": ("", "SIZE", "Memory of each node, such as 64G."),
    "constraint": ("-C", "TEXT", "Features that the nodes must have."),
    "exclude": ("-x", "NODES", "Nodes that must not be used."),
    "dependency": ("-d", "TEXT", "Wait for other jobs, such as afterok:1234."),
    "job-name": ("-J", "TEXT", "Default: the name of the run."),
    "requeues": ("", "N", "Maximum number of requeues. Default: 10."),
}
_NUMBERS = ("nodes", "cpus", "requeues")


def _job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, (short, metavar, text) in reversed(_JOB.items()):
        words = [f"--{name}", *([short] if short else [])]
        of_type = click.IntRange(min=0 if name == "requeues" else 1) if name in _NUMBERS else str
        command = click.option(*words, type=of_type, metavar=metavar, help=text)(command)
    return command


@click.command("submit", cls=Command)
@click.argument("target", metavar="CONFIG|RUN", type=FILE)
@click.option("--engine", type=click.Choice(["slurm"]), help="Engine whose queue gets the job. Default: the config's.")
@_job_options
@OVERRIDES
@click.option("--name", help="Name of the run directory. Default: the config's.")
@click.option("--resume", is_flag=True, help="Resume the newest unfinished run of this name, or the given run.")
@click.option("--dry-run", is_flag=True, help="Print the script; write and submit nothing.")
@click.option("--wait", is_flag=True, help="Follow the job until it has ended, and exit with its code.")
@METRICS_PORT
@METRICS_FILE
@click.option("--json", "as_json", is_flag=True, help="Print the run, the job and the script as JSON.")
@QUIET
def command(target: str, overrides: tuple[str, ...], name: str | None, resume: bool, **given: Any) -> int:
    """Submit a batch job that trains a config or resumes a run.

    The config and the generated batch script are written to the run directory, so later changes to the config file have
    no effect. Before its time limit and on preemption, the job stops with a checkpoint, is requeued and resumes. Each
    option overrides the key of the same name in the config's section `engine` (`kind: slurm`). Use `logs -f`, `runs`
    and `stop` for the job. The exit code is 0 if the job was submitted and 2 if the queue refuses it; with --wait, it
    is the code of the job.
    """
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs.batch import submit
    from distlaunch.jobs.choose_run import JobRequest
    from distlaunch.ui.plain import echo
    from distlaunch.ui.submit import print_nothing_submitted, print_submitted

    as_json, quiet = given["as_json"], given["quiet"]
    if as_json and given["wait"]:
        raise UsageError("--json cannot follow the job; leave out --wait, and use `logs -f` to follow the job")
    if as_json and given["dry_run"]:
        raise UsageError("--dry-run prints the script as it is; leave out --json")
    options = _overrides(given)
    with _naming_options(options):
        request = JobRequest(
            target, overrides, name, resume, metrics_port=given["metrics_port"], metrics_file=given["metrics_file"]
        )
        prepared = submit.prepare(request, given["engine"], tuple(options), Machine.here())
        choice = prepared.choice
        notes = [*([choice.note] if choice.note else []), *prepared.queue.notes(choice.config)]
        for note in () if quiet else notes[:1] if choice.finished else notes:
            echo(note, err=True)
        if choice.finished and choice.run is not None:
            if as_json:
                print_nothing_submitted(choice.run)
            return ExitCode.DONE
        if given["dry_run"]:
            click.echo(prepared.script(prepared.choice.target_run_dir), nl=False)
            return ExitCode.DONE
        submitted = submit.submit(prepared)
    if as_json or not quiet:
        print_submitted(submitted, as_json=as_json)
    return _follow(submitted, quiet=quiet) if given["wait"] else ExitCode.DONE


def _overrides(given: Mapping[str, Any]) -> dict[str, str]:
    """Return overrides of the config that stand for the given options, with the name of each option."""
    values = {name: given[name.replace("-", "_")] for name in _JOB}
    values = {name: escape(value) if isinstance(value, str) else value for name, value in values.items()}
    # quote the values, so that `--account 12` stays a string
    return {
        f"engine.{name.replace('-', '_')}={json.dumps(value, ensure_ascii=False)}": f"--{name}"
        for name, value in values.items()
        if value is not None
    }


@contextlib.contextmanager
def _naming_options(options: Mapping[str, str]) -> Generator[None]:
    """Report errors in an override under the name of the option that it stands for."""
    try:
        yield
    except ConfigError as error:
        sources = {f"--set {text}": option for text, option in options.items()}
        found = [each._replace(source=sources.get(each.source or "", each.source)) for each in error.problems]
        raise ConfigError(found) from None


def _follow(submitted: Submitted, *, quiet: bool) -> int:
    from distlaunch.jobs.batch.job_states import JobWatch
    from distlaunch.runs.logs import LogSelection, await_attempt, follow_logs
    from distlaunch.ui.progress.view import printing_view
    from distlaunch.ui.submit import print_job_continues, print_log

    run = submitted.run
    view = printing_view()
    watch = JobWatch(run, submitted.job, (lambda text: None) if quiet else view.note)
    try:
        has_started = await_attempt(run, wait_a_moment, watch.is_active, submitted.last_attempt)
        if has_started and not quiet:
            follow_logs(run, LogSelection(), view, wait_a_moment, watch.is_active)
        while quiet and watch.is_active() and wait_a_moment():
            pass
        if watch.is_active():  # the reader of the output is gone
            return ExitCode.DONE
    except KeyboardInterrupt:
        print_job_continues(submitted)
        return ExitCode.INTERRUPTED
    code = watch.exit_code()
    if not has_started or code == ExitCode.USAGE:
        print_log(run, submitted.log_bytes)
    return code
