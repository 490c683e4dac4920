"""`distlaunch run`: runs a script as the tasks of a cluster, with the same supervision as training."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from distlaunch.base.errors import UsageError, naming_run
from distlaunch.base.report_page import leaving_page
from distlaunch.base.run_dir import RunDir, check_run_name
from distlaunch.base.secret_mask import masked_arguments
from distlaunch.cluster.environment import describe_environment
from distlaunch.cluster.hosts import TooFewSlotsError
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.base import EngineSection
from distlaunch.config.engines.local import Auto
from distlaunch.engines.base import HostFiles, Needs
from distlaunch.engines.context import SECONDARY_SRUN_TASK, LaunchContext
from distlaunch.jobs.attempt import AttemptResult, end_leftover_processes, recording_failed_start
from distlaunch.jobs.isolation import isolate
from distlaunch.jobs.restarts import Limits, note_hosts, run_with_restarts
from distlaunch.jobs.temporary_failures import limit_temporary_failures
from distlaunch.plan.script import Kind, ScriptJob, plan_script
from distlaunch.plan.train import LaunchPlan
from distlaunch.runs.paths import display_path
from distlaunch.supervise.late_signals import LateSignals
from distlaunch.supervise.observer import Observer, ThreadedObserver
from distlaunch.supervise.requests import SignalPipe
from distlaunch.supervise.supervisor import Supervisor


@dataclass(frozen=True)
class ScriptRequest:
    """A request to run a script.

    Attributes:
        engine: the engine that starts the tasks.
        name: the name of the run directory; None to derive it from the program.
        isolate: whether to hide the ports of the job from other hosts; see `isolate`.
    """

    job: ScriptJob
    limits: Limits
    engine: EngineSection = field(default_factory=Auto)
    runs_dir: str = "runs"
    name: str | None = None
    isolate: bool = False


def run_script(
    request: ScriptRequest,
    observer: Observer,
    machine: Machine,
    on_run: Callable[[RunDir], None] = lambda run: None,
) -> AttemptResult | None:
    """Run a script to its end; return None if another process of the same `srun` runs it.

    Args:
        on_run: called with the run directory before anything is started.

    Raises:
        UsageError: the job cannot be started.
    """
    job = request.job
    context = LaunchContext(
        machine, request.engine.resolve(machine.environ), HostFiles([job.program] if job.kind == "script" else [])
    )
    if context.is_secondary_srun_task:
        observer.note(SECONDARY_SRUN_TASK)
        return None
    if "TF_CONFIG" in machine.environ:
        observer.note("ignoring TF_CONFIG of the environment: each task gets its own")
    engine = context.engine
    if request.isolate:
        isolate(engine)
    if request.name is not None:
        check_run_name(request.name, "--name")
    run = RunDir.claim(request.runs_dir, request.name or run_name(job.program))
    on_run(run)
    late = LateSignals()
    with (
        naming_run(display_path(run.path)),
        leaving_page(run, machine.environ),  # writes the page after the lock is released
        ThreadedObserver.of(observer, late) as threaded,
        run.lock_claim(),
    ):

        def start(signals: SignalPipe) -> AttemptResult:
            return _attempt(job, context, run, threaded, signals, request.limits.window_s)

        note_hosts(engine, threaded.note)
        with engine:
            result = run_with_restarts(start, request.limits, threaded, run.control, late=late)
            result = limit_temporary_failures(run, result)
        late.exit_code = int(result.outcome.exit_code)
        return result


def _attempt(
    job: ScriptJob,
    context: LaunchContext,
    run: RunDir,
    observer: Observer,
    signals: SignalPipe,
    window_s: float | None,
) -> AttemptResult:
    """Run one attempt: start all tasks on fresh addresses and follow them until they end."""
    engine, environ, is_new = context.engine, context.machine.environ, not run.exists()
    needs = Needs(job.num_tasks, job.num_addresses, job.slots, failure_window_s=window_s)
    with signals.raising():
        try:
            allocation = engine.allocate(needs)
        except TooFewSlotsError:  # a host that has failed twice is better than none
            allocation = engine.allocate(dataclasses.replace(needs, avoids_failed_hosts=False))
    try:
        for note in allocation.notes:
            observer.note(note)
        plan = plan_script(job, run, run.next_attempt(), allocation.places, environ, allocation.engine)
        for path in (run.attempt_plan(plan.attempt), run.plan):
            run.write_json(path, _record(plan, environ))
        run.write_json(
            run.environment, describe_environment(allocation.places[0].gpus, settings=plan.settings.to_plain())
        )
        supervisor = Supervisor(plan, allocation, observer, signals=signals)
        with recording_failed_start(plan, supervisor, is_new=is_new):
            outcome = supervisor.run()
        end_leftover_processes(plan, observer)
        return AttemptResult(plan, outcome)
    finally:
        allocation.release()


def _record(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON form of a plan, with the secrets in the script's arguments masked."""
    plain = plan.to_plain()
    commands = {tuple(task["argv"]) for task in plain["tasks"]}
    shown = {command: masked_arguments(command, environ) for command in commands}
    return {**plain, "tasks": [{**task, "argv": shown[tuple(task["argv"])]} for task in plain["tasks"]]}


def find_program(target: str, *, module: bool) -> tuple[Kind, str]:
    """Return whether the target is a script, a module or a program, and how tasks start it.

    Raises:
        UsageError: there is no such target.
    """
    if module:
        _find_module(target)
        return "module", target
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{target} is a folder; give a script in it, or -m MODULE")
    if path.suffix == ".py":
        if not path.is_file():
            raise UsageError(f"{target}: there is no such script")
        return "script", target
    if shutil.which(target):
        return "program", target
    if path.is_file() and os.access(path, os.X_OK):
        return "program", str(path.absolute())  # a bare name would be searched for in PATH only
    if path.is_file():
        raise UsageError(f"{target} is neither a Python script (.py) nor executable")
    raise UsageError(f"{target}: there is no such script or program")


def _find_module(name: str) -> None:
    """Raise UsageError if there is no such module. Its packages are not imported: that may take seconds."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise UsageError(f"-m {name}: expected the name of a module, such as package.module")
    places = [os.getcwd(), *sys.path]
    parts = name.split(".")
    # `importlib.util` also knows built-in modules and editable installs
    spec = PathFinder.find_spec(parts[0], places) or importlib.util.find_spec(parts[0])
    for number in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            break
        spec = PathFinder.find_spec(".".join(parts[:number]), list(spec.submodule_search_locations))
    else:
        if spec is not None and spec.submodule_search_locations is not None:
            package = spec
            spec = PathFinder.find_spec(f"{name}.__main__", list(package.submodule_search_locations or ()))
            if spec is None:
                raise UsageError(f"-m {name}: it is a package without a module __main__, and cannot be run")
        if spec is not None:
            return
    raise UsageError(f"-m {name}: there is no such module")


def run_name(program: str) -> str:
    """Return the name of a program's run directory."""
    stem = program if "/" not in program and not program.endswith(".py") else Path(program).stem
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem).lstrip("._-") or "run"
