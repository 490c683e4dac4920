"""Runs a job: attempts of a run, each from the last checkpoint, until one succeeds or a restart would not help."""

from __future__ import annotations

import dataclasses
import math
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlaunch.agent.messages import LOST_HOST
from distlaunch.base.errors import ExitCode, StopRequested, UsageError
from distlaunch.base.plural import count, listed
from distlaunch.base.run_dir import RunDir
from distlaunch.base.signals import JOB_STOP_SIGNALS
from distlaunch.config.checks.config import fitting_workers
from distlaunch.config.cluster import WorkerRange
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Engine
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import AttemptResult, run_attempt
from distlaunch.supervise.diagnose.diagnosis import EXIT_MARK
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.late_signals import LateSignals
from distlaunch.supervise.observer import Observer, ThreadedObserver
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.requests import SignalPipe
from distlaunch.supervise.run_events import write_end

_LONGEST_BACKOFF_S = 300.0  # documented at the config key `restarts.backoff_s`


@dataclass(frozen=True)
class Limits:
    """Limits on restarts; see `config.run.Restarts`."""

    max_restarts: int
    window_s: float | None = None
    backoff_s: float = 0.0


def run_job(
    config: RunConfig, run: RunDir, observer: Observer, context: LaunchContext, late: LateSignals
) -> AttemptResult:
    """Train a run, and restart it after failures that may be temporary. The caller must hold the lock of the run.

    Args:
        late: see `SignalPipe`.
    """
    workers, is_range = config.cluster.num_workers, isinstance(config.cluster.workers, WorkerRange)

    def start(signals: SignalPipe) -> AttemptResult:
        return run_attempt(
            config, run, "train", observer, context, signals=signals, workers=workers if is_range else None
        )

    def adapt_workers(outcome: Outcome) -> str:
        nonlocal workers
        before = workers
        workers = _next_workers(config, workers, lost=outcome.lost, num_gpus=len(context.machine.gpus))
        return f", with {count(workers, 'worker')} instead of {before}" if workers != before else ""

    policy = config.restarts
    limits = Limits(config.max_restarts, policy.window_s, policy.backoff_s)
    note_hosts(context.engine, observer.note)
    with context.engine:
        return run_with_restarts(start, limits, observer, run.control, adapt_workers, late)


def note_hosts(engine: Engine, note: Callable[[str], None]) -> None:
    """Print the hosts that the launcher connects to, since connecting may take seconds."""
    if engine.hosts:
        note(f"connecting to {listed(engine.hosts)}")


def run_with_restarts(
    start: Callable[[SignalPipe], AttemptResult],
    limits: Limits,
    observer: Observer,
    control: Path,
    adapt: Callable[[Outcome], str] = lambda outcome: "",
    late: LateSignals | None = None,
) -> AttemptResult:
    """Run a job, and restart it after failures that may be temporary.

    Args:
        start: runs an attempt.
        control: the run's socket for requests.
        adapt: called before a restart; adapts the next attempt and returns words about the change.
        late: see `SignalPipe`.
    """
    restart_times, mark = list[float](), ""  # the mark identifies the last failure
    result: AttemptResult | None = None
    # signals are handled over all attempts: one that comes between two attempts must end the job as well
    with ThreadedObserver.of(observer) as threaded, SignalPipe(control, late) as signals:
        while True:
            try:
                result = start(signals)
            except StopRequested as stop:
                if result is None:
                    raise
                return _stopped(result, stop.number, threaded)
            except (OSError, UsageError) as error:  # a full disk; ports or nodes that are gone
                # the first attempt could not be started: that is an error of the command
                if result is None:
                    raise
                final = _handle_failed_start(result, error, restart_times, limits, signals, threaded)
                if final is not None:
                    return final
                continue
            outcome, failure = result.outcome, result.outcome.failure
            recent = _recent_restarts(restart_times, limits.window_s)
            if failure is None or not outcome.retryable or len(recent) >= limits.max_restarts:
                return result
            if outcome.mark and outcome.mark == mark:
                threaded.note(_would_recur(mark, at_step=result.plan.mode != "run"))
                return result
            mark = outcome.mark
            # a stop signal may have come while the attempt ended
            if stop := _stop_signal_within(signals, 0):
                return _stopped(result, stop, threaded)
            backoff_s, after = _backoff(limits, len(recent))
            why = _describe_failure(failure, has_hosts=any(task.host for task in result.plan.tasks))
            threaded.note(f"restart {len(recent) + 1} of {limits.max_restarts}{after}{adapt(outcome)}: {why}")
            if backoff_s and (stop := _stop_signal_within(signals, backoff_s)):
                return _stopped(result, stop, threaded)
            restart_times.append(time.monotonic())


def _handle_failed_start(
    result: AttemptResult,
    error: Exception,
    restart_times: list[float],
    limits: Limits,
    signals: SignalPipe,
    threaded: ThreadedObserver,
) -> AttemptResult | None:
    """Wait after a restart that could not start its tasks, since a lost host may return soon.

    Returns:
        The final result of the job, or None if another restart is allowed.
    """
    recent = _recent_restarts(restart_times, limits.window_s)
    if len(recent) >= limits.max_restarts:
        why = f"cannot be restarted: {error}"
        outcome = dataclasses.replace(result.outcome, warnings=(*result.outcome.warnings, why))
        return dataclasses.replace(result, outcome=outcome)
    backoff_s, after = _backoff(limits, len(recent))
    why = f"the last one could not start the tasks: {error}"
    threaded.note(f"restart {len(recent) + 1} of {limits.max_restarts}{after}: {why}")
    if stop := _stop_signal_within(signals, backoff_s):
        return _stopped(result, stop, threaded)
    # always count this restart, whatever the window: otherwise the job could be restarted forever
    restart_times.append(math.inf)
    return None


def _backoff(limits: Limits, num_recent: int) -> tuple[float, str]:
    """Return the seconds to wait before the next restart, doubled for each recent restart, and words about the wait."""
    seconds = min(limits.backoff_s * 2**num_recent, _LONGEST_BACKOFF_S)
    return seconds, f" in {seconds:g} s" if seconds else ""


def _describe_failure(failure: Failure, *, has_hosts: bool) -> str:
    """Describe the failed task, its host and the reason."""
    if failure.reason.startswith(LOST_HOST):  # the reason is a complete sentence
        return failure.reason
    needs_host = has_hosts and failure.task and failure.host not in failure.reason
    where = f" on {failure.host}" if needs_host else ""
    return f"{failure.task}{where} {failure.reason}".lstrip()


def _would_recur(mark: str, *, at_step: bool) -> str:
    what = "exit code" if mark.startswith(EXIT_MARK) else "exception"
    return f"the same {what}{' at the same step' if at_step else ''} twice in a row: a restart would not help"


def _recent_restarts(restart_times: Sequence[float], window_s: float | None) -> list[float]:
    now = time.monotonic()
    return [at for at in restart_times if window_s is None or now - at <= window_s]


def _next_workers(config: RunConfig, workers: int, *, lost: bool, num_gpus: int) -> int:
    """Return the number of workers of the next attempt.

    Without a range in the config, the number stays the same. With a range, it is smaller after an attempt with all
    workers has lost a task, if a smaller number fits the config. In all other cases, it is the maximum.
    """
    wanted = config.cluster.workers
    if not isinstance(wanted, WorkerRange):
        return workers
    if not lost or workers < wanted.max:
        return wanted.max
    fewer = range(workers - 1, wanted.min - 1, -1)
    return fitting_workers(config, fewer, num_gpus) or workers


def _stop_signal_within(signals: SignalPipe, seconds: float) -> signal.Signals | None:
    """Wait for up to `seconds` for a stop signal; return None if none came. A pending signal counts."""
    until = time.monotonic() + seconds
    while True:
        stop = [number for number in signals.read() if number in JOB_STOP_SIGNALS]
        if stop:
            return signal.SIGINT if signal.SIGINT in stop else stop[0]
        if (left := until - time.monotonic()) <= 0:
            return None
        select.select([signals.fd], [], [], left)


def _stopped(result: AttemptResult, number: signal.Signals, threaded: ThreadedObserver) -> AttemptResult:
    """Record the end of a job that was stopped between two attempts, and return its result."""
    threaded.note(f"stopping ({number.name})")
    outcome = Outcome("interrupted" if number == signal.SIGINT else "stopped", ExitCode.PREEMPTED, stopped_by=number)
    if (end := write_end(result.plan, outcome.status)) is not None:
        threaded.event(end)
    return dataclasses.replace(result, outcome=outcome)
