"""Submits a run to a scheduler's queue."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.base.run_files.submission import Submission
from distlaunch.cluster.machine import Machine
from distlaunch.engines import kinds_with_queue, make_queue
from distlaunch.engines.base import Queue, Start
from distlaunch.jobs.batch.job_states import live_job
from distlaunch.jobs.choose_run import Choice, JobRequest, choose
from distlaunch.jobs.metrics import metrics_options
from distlaunch.runs.paths import display_path


@dataclass(frozen=True)
class PreparedJob:
    """A job that can be submitted unless its run has finished. Nothing is written yet.

    Attributes:
        train_options: more options of the `distlaunch train` that the job starts.
    """

    choice: Choice
    queue: Queue
    machine: Machine
    train_options: tuple[str, ...] = ()

    def script(self, run: RunDir) -> str:
        """Return the batch script that trains a run. Raise ConfigError if it cannot be written."""
        try:
            return self.queue.script(self.choice.config, Start(run, sys.executable, Path.cwd(), self.train_options))
        except ConfigError as error:
            raise ConfigError(self.choice.locate(error.problems)) from None


@dataclass(frozen=True)
class Submitted:
    """A job in the queue.

    Attributes:
        last_attempt: the number of the run's last attempt before this job; -1 if there is none.
        log_bytes: the size of launcher.log before this job.
    """

    run: RunDir
    job: Submission
    last_attempt: int
    log_bytes: int


def prepare(request: JobRequest, engine: str | None, options: Sequence[str], machine: Machine) -> PreparedJob:
    """Choose the run to submit.

    Args:
        engine: the engine whose queue is used; None for the engine of the config.
        options: overrides of keys that only engines with a queue have.
    """
    # TF_CONFIG of this shell describes tasks on this machine, not those of the submitted job
    machine = machine.without_variables(["TF_CONFIG"])
    request = replace(request, overrides=(*request.overrides, *([f"engine.kind={engine}"] if engine else [])))
    try:
        choice = choose(replace(request, overrides=(*request.overrides, *options)), machine)
    except ConfigError:
        if options:  # if the engine has no queue, report that instead of unknown keys
            with contextlib.suppress(ConfigError):
                _check_queue(choose(request, machine))
        raise
    _check_queue(choice)
    options = metrics_options(request.metrics_port, request.metrics_file)
    return PreparedJob(choice, make_queue(choice.config.engine.kind), machine, options)


def _check_queue(choice: Choice) -> None:
    """Raise UsageError if the config's engine has no queue."""
    kind = choice.config.engine.kind
    if not choice.config.engine.queue:
        known = " or ".join(f"--engine {name}" for name in kinds_with_queue())
        raise UsageError(f"the config's engine.kind is {kind}, which has no queue; add {known}")


def submit(prepared: PreparedJob) -> Submitted:
    """Write the run directory and submit its script. Raise UsageError if the queue refuses it."""
    from distlaunch.config.read.load import dump_config

    choice = prepared.choice
    # find errors in the script before writing anything
    prepared.script(choice.target_run_dir)
    if choice.run is not None:
        with choice.run.lock():
            pass  # only check that no launcher works on the run
        _check_not_queued(choice.run)
    run = choice.run or RunDir.claim(choice.config.runs_dir, choice.name)
    before = run.config.read_text(encoding="utf-8") if run.exists() else None
    last_attempt = run.next_attempt() - 1
    log_bytes = run.launcher_log.stat().st_size if run.launcher_log.exists() else 0
    try:
        run.batch_exit.unlink(missing_ok=True)
        run.batch_not_before.unlink(missing_ok=True)
        run.keep_secrets(choice.config.secrets.variables)
        write_atomically(run.config, dump_config(choice.config))
        write_atomically(run.batch_script, prepared.script(run))
        submission = prepared.queue.submit(run.batch_script, choice.config, prepared.machine.environ)
    except BaseException:
        _roll_back(run, before)
        raise
    run.write_submission(submission)
    return Submitted(run, submission, last_attempt, log_bytes)


def _roll_back(run: RunDir, config: str | None) -> None:
    """Restore the run directory to its state before the submission."""
    if config is not None:
        write_atomically(run.config, config)
        return
    run.forget_secrets()
    for path in (run.config, run.batch_script):
        path.unlink(missing_ok=True)
    run.discard()


def _check_not_queued(run: RunDir) -> None:
    if (found := live_job(run)) is not None:
        job, state = found
        raise UsageError(
            f"{display_path(run.path)} is already in the queue: job {job.job}, {state}; "
            f"use `distlaunch stop {display_path(run.path)}` to cancel it"
        )
