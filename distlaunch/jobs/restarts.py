"""A job: the attempts of a run, each from the last checkpoint, until one ends well or need not be repeated."""

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
from distlaunch.supervise.observer import Observer, ThreadedObserver
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.requests import SignalPipe
from distlaunch.supervise.run_events import write_end

_LONGEST_BACKOFF_S = 300.0  # as the config's `restarts.backoff_s` says


@dataclass(frozen=True)
class Limits:
    """Limits on restarts; see `config.run.Restarts`."""

    most: int
    window_s: float | None = None
    backoff_s: float = 0.0


def run_job(config: RunConfig, run: RunDir, observer: Observer, context: LaunchContext) -> AttemptResult:
    """Train a run, whose lock the caller holds, and restart it after failures that may be temporary."""
    workers, is_range = config.cluster.num_workers, isinstance(config.cluster.workers, WorkerRange)

    def start(signals: SignalPipe) -> AttemptResult:
        return run_attempt(
            config, run, "train", observer, context, signals=signals, workers=workers if is_range else None
        )

    def change(outcome: Outcome) -> str:
        nonlocal workers
        before = workers
        workers = _next_workers(config, workers, lost=outcome.lost, num_gpus=len(context.machine.gpus))
        return f", with {count(workers, 'worker')} instead of {before}" if workers != before else ""

    policy = config.restarts
    limits = Limits(config.max_restarts, policy.window_s, policy.backoff_s)
    note_hosts(context.engine, observer.note)
    with context.engine:
        return run_with_restarts(start, limits, observer, run.control, change)


def note_hosts(engine: Engine, note: Callable[[str], None]) -> None:
    """Print which hosts a start is waiting for, since that may take seconds."""
    if engine.hosts:
        note(f"connecting to {listed(engine.hosts)}")


def run_with_restarts(
    start: Callable[[SignalPipe], AttemptResult],
    limits: Limits,
    observer: Observer,
    control: Path,
    change: Callable[[Outcome], str] = lambda outcome: "",
) -> AttemptResult:
    """Run a job, and restart it after failures that may be temporary.

    Args:
        start: runs an attempt.
        control: the run's socket for requests.
        change: called before a restart; adapts the next attempt and prints the change.
    """
    starts, mark = list[float](), ""  # when it was started again; what the last failure was
    result: AttemptResult | None = None
    # held over all attempts: a signal between two of them must end the job as well
    with ThreadedObserver.of(observer) as threaded, SignalPipe(control) as signals:
        while True:
            try:
                result = start(signals)
            except StopRequested as stop:
                if result is None:
                    raise
                return _stopped(result, stop.number, threaded)
            except (OSError, UsageError) as error:  # a full disk; ports or nodes that are gone
                # nothing was started yet: the command's own error
                if result is None:
                    raise
                if (ended := _after_no_start(result, error, starts, limits, signals, threaded)) is not None:
                    return ended
                continue
            outcome, failure = result.outcome, result.outcome.failure
            recent = _recent(starts, limits.window_s)
            if failure is None or not outcome.retryable or len(recent) >= limits.most:
                return result
            if outcome.mark and outcome.mark == mark:
                threaded.note(_would_come_again(mark, at_step=result.plan.mode != "run"))
                return result
            mark = outcome.mark
            # a signal that came while the attempt ended
            if stop := _stop_signal_within(signals, 0):
                return _stopped(result, stop, threaded)
            backoff_s, after = _backoff(limits, len(recent))
            why = _named(failure, has_hosts=any(task.host for task in result.plan.tasks))
            threaded.note(f"restart {len(recent) + 1} of {limits.most}{after}{change(outcome)}: {why}")
            if backoff_s and (stop := _stop_signal_within(signals, backoff_s)):
                return _stopped(result, stop, threaded)
            starts.append(time.monotonic())


def _after_no_start(
    result: AttemptResult,
    error: Exception,
    starts: list[float],
    limits: Limits,
    signals: SignalPipe,
    threaded: ThreadedObserver,
) -> AttemptResult | None:
    """Wait after a restart that found too few hosts, since one may return soon; return the end if it is final."""
    recent = _recent(starts, limits.window_s)
    if len(recent) >= limits.most:
        why = f"cannot be started again: {error}"
        outcome = dataclasses.replace(result.outcome, warnings=(*result.outcome.warnings, why))
        return dataclasses.replace(result, outcome=outcome)
    backoff_s, after = _backoff(limits, len(recent))
    threaded.note(f"restart {len(recent) + 1} of {limits.most}{after}: it could not be started: {error}")
    if stop := _stop_signal_within(signals, backoff_s):
        return _stopped(result, stop, threaded)
    # outside any window, else it might be tried for ever
    starts.append(math.inf)
    return None


def _backoff(limits: Limits, num_recent: int) -> tuple[float, str]:
    """Return the seconds to wait before the next restart, doubled with each recent one, and the words for it."""
    seconds = min(limits.backoff_s * 2**num_recent, _LONGEST_BACKOFF_S)
    return seconds, f" in {seconds:g} s" if seconds else ""


def _named(failure: Failure, *, has_hosts: bool) -> str:
    """Describe the failed task, its host and the reason."""
    if failure.reason.startswith(LOST_HOST):  # a sentence of its own
        return failure.reason
    is_told = not failure.task or failure.host in failure.reason
    where = f" on {failure.host}" if has_hosts and not is_told else ""
    return f"{failure.task}{where} {failure.reason}".lstrip()


def _would_come_again(mark: str, *, at_step: bool) -> str:
    what = "exit code" if mark.startswith(EXIT_MARK) else "exception"
    return f"the same {what}{' at the same step' if at_step else ''} twice in a row: it would come again"


def _recent(starts: Sequence[float], window_s: float | None) -> list[float]:
    now = time.monotonic()
    return [at for at in starts if window_s is None or now - at <= window_s]


def _next_workers(config: RunConfig, workers: int, *, lost: bool, num_gpus: int) -> int:
    """Return the number of workers of the next attempt: one fewer after a loss, all of them the time after."""
    wanted = config.cluster.workers
    if not isinstance(wanted, WorkerRange):
        return workers
    if not lost or workers < wanted.max:
        return wanted.max
    fewer = range(workers - 1, wanted.min - 1, -1)
    return fitting_workers(config, fewer, num_gpus) or workers


def _stop_signal_within(signals: SignalPipe, seconds: float) -> signal.Signals | None:
    """Wait for up to `seconds` and return the signal that has asked the job to end since the last attempt, if any."""
    until = time.monotonic() + seconds
    while True:
        stop = [number for number in signals.read() if number in JOB_STOP_SIGNALS]
        if stop:
            return signal.SIGINT if signal.SIGINT in stop else stop[0]
        if (left := until - time.monotonic()) <= 0:
            return None
        select.select([signals.fd], [], [], left)


def _stopped(result: AttemptResult, number: signal.Signals, threaded: ThreadedObserver) -> AttemptResult:
    """Record and return the end of a job that was stopped while none of its processes ran."""
    threaded.note(f"stopping ({number.name})")
    outcome = Outcome("interrupted" if number == signal.SIGINT else "stopped", ExitCode.PREEMPTED, stopped_by=number)
    if (end := write_end(result.plan, outcome.status)) is not None:
        threaded.event(end)
    return dataclasses.replace(result, outcome=outcome)
