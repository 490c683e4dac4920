"""Hands a run to a scheduler's queue, and tells how it stands there."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import ConfigError, DistlaunchError, ExitCode, UsageError
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.base.submission import JobState, Submission
from distlaunch.engines import QUEUES
from distlaunch.engines.base import Queue, Start
from distlaunch.jobs.job import Choice, JobRequest, choose
from distlaunch.runs.paths import shown

_ASK_AGAIN_S = 5.0
"""A scheduler is asked as rarely as a person at a terminal would mind."""
_ASK_SOON_S = 1.0
"""The same for a job that has stopped, and will perhaps be queued again."""
_NOTHING_WRITTEN = "it wrote nothing into {}; is that on a disk that its nodes share?"


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be submitted; nothing is written yet."""

    choice: Choice
    queue: Queue
    environ: Mapping[str, str]

    def script(self, run: RunDir) -> str:
        """The script that trains a run. Raises ConfigError."""
        try:
            return self.queue.script(self.choice.config, Start(run, sys.executable, Path.cwd()))
        except ConfigError as error:
            raise ConfigError(self.choice.locate(error.problems)) from None


@dataclass(frozen=True)
class Submitted:
    """A job in the queue.

    Attributes:
        attempts: the number of the newest attempt before it; -1: there is none.
        log_bytes: how long launcher.log was before it.
    """

    run: RunDir
    job: Submission
    attempts: int
    log_bytes: int


def prepare(request: JobRequest, engine: str, environ: Mapping[str, str]) -> Prepared:
    """Chooses the run. Raises ConfigError, UsageError."""
    # that of the shell is for jobs that start here; and it is not this machine whose devices count
    environ = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
    overrides = (*request.overrides, f"engine.kind={engine}")
    choice = choose(JobRequest(request.target, overrides, request.name, request.resume), environ)
    if choice.run is not None and choice.run.finished() and not request.overrides and Path(request.target).is_dir():
        raise UsageError(f"{shown(choice.run.path)} is finished already; there is nothing to submit")
    return Prepared(choice, QUEUES[engine](), environ)


def submit(prepared: Prepared) -> Submitted:
    """Writes the run directory, and submits its script. Raises UsageError if the queue refuses it."""
    from distlaunch.config.read.load import dump_config

    choice = prepared.choice
    # before anything is written: what the script would be told is wrong
    prepared.script(choice.would_be)
    if choice.run is not None:
        with choice.run.lock():
            pass  # nobody works on it
        _check_not_queued(choice.run)
    run = choice.run or RunDir.claim(choice.config.runs_dir, choice.name)
    before = run.config.read_text(encoding="utf-8") if run.exists() else None
    attempts = run.next_attempt() - 1
    log_bytes = run.launcher_log.stat().st_size if run.launcher_log.exists() else 0
    try:
        run.batch_exit.unlink(missing_ok=True)
        write_atomically(run.config, dump_config(choice.config))
        write_atomically(run.batch_script, prepared.script(run))
        submission = prepared.queue.submit(run.batch_script, choice.config, prepared.environ)
    except BaseException:
        _take_back(run, before)
        raise
    run.write_submission(submission)
    return Submitted(run, submission, attempts, log_bytes)


def _take_back(run: RunDir, config: str | None) -> None:
    """Leaves a run as it was."""
    if config is not None:
        write_atomically(run.config, config)
        return
    for path in (run.config, run.batch_script):
        path.unlink(missing_ok=True)
    run.discard()


def _check_not_queued(run: RunDir) -> None:
    if (found := live_job(run)) is not None:
        job, state = found
        raise UsageError(
            f"{shown(run.path)} is in the queue already: job {job.job}, {state}; "
            f"`distlaunch stop {shown(run.path)}` ends it"
        )


def live_job(run: RunDir) -> tuple[Submission, JobState] | None:
    """The submitted job of a run that waits or runs; None: there is none, or its queue does not answer here."""
    job = run.submission()
    if job is None or not run.may_be_queued():
        return None
    state = job_state(job)
    return None if state is None or state.phase == "ended" else (job, state)


def state_of(run: RunDir) -> JobState | None:
    """How the submitted job of a run stands; None: it has none, has told its end, or its queue does not answer here."""
    job = run.submission()
    return job_state(job) if job is not None and run.may_be_queued() else None


def job_state(job: Submission) -> JobState | None:
    """How a job stands; None: its queue does not answer here."""
    return job_states([job]).get(job)


def job_states(jobs: Iterable[Submission]) -> dict[Submission, JobState]:
    """How jobs stand, as far as their queues answer here."""
    found: dict[Submission, JobState] = {}
    of_engines: dict[str, list[Submission]] = {}
    for job in jobs:
        of_engines.setdefault(job.engine, []).append(job)
    for engine, members in of_engines.items():
        # another machine, or a scheduler that is just being restarted
        with contextlib.suppress(DistlaunchError, KeyError):
            found |= QUEUES[engine]().states(members)
    return found


class JobWatch:
    """Follows a submitted job from where its run directory is seen.

    Args:
        note: takes what there is to be said about it.
    """

    def __init__(self, run: RunDir, job: Submission, note: Callable[[str], None]) -> None:
        self._run, self._job, self._note = run, job, note
        self._asked_at: float | None = None
        self._told = ""
        self._state: JobState | None = None

    def goes_on(self) -> bool:
        """Whether the job waits or runs. An answer may be some seconds old."""
        if not self._run.may_be_queued():
            return False
        now = time.monotonic()
        has_ended = self._run.job_exit_code() is not None
        if self._asked_at is None or now - self._asked_at >= (_ASK_SOON_S if has_ended else _ASK_AGAIN_S):
            self._state = job_state(self._job) or self._state
            self._asked_at = now
            self._tell()
        return self._state is None or self._state.phase != "ended"

    def exit_code(self) -> int:
        """The code of a job that has ended."""
        code = self._run.job_exit_code()
        if code is not None:
            return code
        word = self._state.word if self._state else ""
        if word == "CANCELLED":
            self._note(f"job {self._job.job} was cancelled")
            return ExitCode.PREEMPTED
        wrote = self._run.launcher_log.exists()
        where = f"see {shown(self._run.launcher_log)}" if wrote else _NOTHING_WRITTEN.format(shown(self._run.path))
        self._note(f"job {self._job.job} has ended{f' as {word}' if word else ''}, and has not told its end; {where}")
        return ExitCode.FAILED

    def _tell(self) -> None:
        state = self._state
        # that it runs is seen by what it shows, once it shows something
        is_news = state is not None and (
            state.phase == "pending" or (state.phase == "running" and not self._run.attempts())
        )
        told = f"job {self._job.job}: {state}" if is_news else ""
        if told and told != self._told:
            self._note(told)
        self._told = told
