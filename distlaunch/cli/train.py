"""`distlaunch train`: runs a config, or resumes a run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import click

from distlaunch.base.errors import (
    ConfigError,
    DistlaunchError,
    ExitCode,
    Problem,
    StopRequested,
    UsageError,
    code_of_os_error,
    message_of,
)
from distlaunch.base.secret_mask import SecretMask
from distlaunch.cli.exit_codes import Command
from distlaunch.cli.options import FILE, JSON_EVENTS, JUNIT, METRICS_FILE, METRICS_PORT, OVERRIDES, QUIET

if TYPE_CHECKING:
    from distlaunch.base.run_dir import RunDir
    from distlaunch.jobs.choose_run import JobRequest
    from distlaunch.ui.ci import Case


@click.command("train", cls=Command)
@click.argument("targets", metavar="CONFIG|RUN", nargs=-1, required=True, type=FILE)
@OVERRIDES
@click.option("--name", help="Name of the run directory. Default: the config's.")
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the newest unfinished run of this name, or add the outputs that a finished run lacks.",
)
@click.option("--smoke", is_flag=True, help="Test the config in about a minute: a few steps, a resume, an export.")
@click.option("--debug", is_flag=True, help="Train on one device in this process, so that breakpoint() works.")
@click.option("--detach", "-d", is_flag=True, help="Start the job and return; it survives a closed terminal.")
@METRICS_PORT
@METRICS_FILE
@JUNIT
@JSON_EVENTS
@QUIET
def command(
    targets: tuple[str, ...],
    overrides: tuple[str, ...],
    name: str | None,
    resume: bool,
    smoke: bool,
    debug: bool,
    detach: bool,
    metrics_port: str | None,
    metrics_file: str | None,
    junit_xml: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train the model of a config, with checkpoints, validation and exports.

    With --resume, you may give a run directory instead of a config. Training continues from its newest intact
    checkpoint. With --debug, your functions, including data.map and data.augment, run line by line in Python; the
    global batch size stays the same, and the run is called NAME-debug. With --smoke, you may give several configs; the
    exit code is the worst of their codes. With --detach, the launcher writes to RUN/launcher.log; use `logs`, `stop`
    and `runs` for the job.
    """
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs import job
    from distlaunch.jobs.choose_run import JobRequest
    from distlaunch.ui.progress.view import make_view, show

    target = targets[0]
    if not smoke and (len(targets) > 1 or junit_xml is not None):
        what, instead = ("--junit-xml", "leave out --junit-xml") if junit_xml is not None else (
            f"got {len(targets)} configs", "give one config"
        )  # fmt: skip
        raise UsageError(f"{what}: only `train --smoke` and `validate` accept that; add --smoke, or {instead}")
    if smoke and resume:
        raise UsageError(
            "--resume: not possible with --smoke, which starts a short run of its own; leave out one of them"
        )
    if name is not None and len(targets) > 1:
        raise UsageError("--name: several configs cannot have the same name; leave out --name")
    metrics = {"--metrics-port": metrics_port is not None, "--metrics-file": metrics_file is not None}
    if smoke and any(metrics.values()):
        given = " and ".join(option for option, is_given in metrics.items() if is_given)
        raise UsageError(f"{given}: not possible with --smoke, whose short runs offer no metrics; leave out {given}")
    if debug:
        others = {"--resume": resume, "--smoke": smoke, "--detach": detach, "--json": as_json, "--quiet": quiet}
        others |= metrics
        _debug(target, overrides, name, [option for option, given in others.items() if given])
    request = JobRequest(target, overrides, name, resume, metrics_port=metrics_port, metrics_file=metrics_file)
    if detach:
        if smoke:
            raise UsageError("--detach: --smoke takes a minute and prints its results here; leave one of them out")
        return _detached(request, as_json=as_json, quiet=quiet)
    if smoke:
        requests = [replace(request, target=each) for each in targets]
        return _smoke_all(requests, junit_xml, as_json=as_json, quiet=quiet)
    view = make_view(as_json=as_json, quiet=quiet, config=target)
    return show(view, lambda: job.train(request, view, Machine.here(), view.begin))


def _smoke_all(requests: list[JobRequest], junit_xml: str | None, *, as_json: bool, quiet: bool) -> int:
    """Test each config, and return the worst exit code. Errors of a single config are raised."""
    from distlaunch.runs.final_code import worst_code
    from distlaunch.ui.ci import Case, annotate, write_junit
    from distlaunch.ui.plain import echo, echo_error

    cases, codes = list[Case](), list[int]()
    raised: DistlaunchError | OSError | StopRequested | None = None
    for request in requests:
        began = time.monotonic()
        try:
            code, case = smoke_test(request, as_json=as_json, quiet=quiet)
        except (DistlaunchError, OSError, StopRequested) as error:
            raised, message = error, SecretMask(os.environ).whole(message_of(error))
            code = int(code_of_os_error(error) if isinstance(error, OSError) else error.exit_code)
            case = Case(request.target, 0.0, message)
            if not isinstance(error, ConfigError | StopRequested):
                annotate([Problem((), message, request.target)])
            if len(requests) > 1:
                echo_error(message if "\n" in message else f"error: {message}")
                annotate(error.problems if isinstance(error, ConfigError) else ())
        cases.append(replace(case, seconds=time.monotonic() - began))
        codes.append(code)
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):  # a stop request is for all configs
            break
    if junit_xml is not None:
        write_junit(junit_xml, "smoke", cases)
    if raised is not None and len(requests) == 1:
        raise raised
    if len(requests) > 1 and not quiet:
        for case, code in zip(cases, codes, strict=True):
            how = f"no, exit code {code}: {case.failure.splitlines()[0]}" if code else f"ok ({case.seconds:.0f} s)"
            echo(f"{case.config}: {how}", err=as_json)
    return worst_code(codes)


def smoke_test(request: JobRequest, *, as_json: bool, quiet: bool) -> tuple[int, Case]:
    """Test a config; return the exit code and the result for a report."""
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs import smoke as smoking
    from distlaunch.ui.ci import Case, annotate, failure_text
    from distlaunch.ui.progress.view import make_view, reporting_errors, why_failed
    from distlaunch.ui.report import missing_proofs, print_missing, print_proofs

    view = make_view(as_json=as_json, quiet=quiet, config=request.target)
    with reporting_errors(view):
        proven = smoking.smoke(request, view, Machine.here())
    view.report(proven.last)
    outcome, missing = proven.last.outcome, missing_proofs(proven)
    # the attempt may have succeeded although a test of the smoke run has failed
    code = int(outcome.exit_code or (ExitCode.DONE if proven.passed else ExitCode.FAILED))
    if not quiet:
        print_proofs(proven, request.target, to_stderr=as_json)
    elif not outcome.exit_code:
        print_missing(proven)
    if outcome.status == "done" and code:
        annotate([Problem((), line, request.target) for line in missing])
    why = (why_failed(proven.last) or "\n".join(missing) or outcome.status) if code else ""
    view.finished(outcome.status if proven.passed else "failed", code, why)
    if not code:
        return code, Case(request.target, 0.0)
    if (failure := outcome.failure) is None:
        return code, Case(request.target, 0.0, why)
    return code, Case(request.target, 0.0, failure_text(why, failure), failure.place)


def _debug(target: str, overrides: tuple[str, ...], name: str | None, others: list[str]) -> NoReturn:
    """Replace this program by one that trains without graphs, so that a debugger can follow it."""
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs.debug import become_debugger

    if others:
        message = "starts a new run in this terminal"
        raise UsageError(f"--debug {message}; leave out {' and '.join(others)}")
    become_debugger(target, overrides, name, Machine.here())


def _detached(request: JobRequest, *, as_json: bool, quiet: bool) -> int:
    """Start the run here, and continue it in a process in the background."""
    from distlaunch.cluster.machine import Machine
    from distlaunch.jobs import detach, job
    from distlaunch.ui.progress.view import DetachedView, NotesView, make_view, print_detached

    def finished(run: RunDir) -> None:
        if not quiet:
            print_detached(run, None, as_json=as_json)

    claimed = job.begin(request, make_view(quiet=True) if quiet else NotesView(), Machine.here(), finished)
    if claimed is None:
        return ExitCode.DONE
    if claimed.choice.evaluator_only:
        raise UsageError("--detach does not work for an evaluator with a launcher of its own; use nohup")
    # fork after `begin`, so that errors in the request are reported in this terminal
    side = detach.fork_launcher(claimed.run.launcher_log)
    if isinstance(side, detach.Waiting):
        code = side.wait()
        if code is None and not quiet:
            print_detached(claimed.run, side.pid, as_json=as_json)
        return int(code or ExitCode.DONE)
    view = DetachedView(side.settle)
    result = job.execute(claimed, view)
    view.report(result)
    return int(result.outcome.exit_code)
