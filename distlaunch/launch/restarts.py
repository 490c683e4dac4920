"""A job: the attempts of a run, each from the last checkpoint, until one ends well or need not be repeated."""

from __future__ import annotations

import dataclasses
import itertools
import signal
from collections.abc import Mapping

from distlaunch.config.restarts import max_restarts
from distlaunch.config.run import RunConfig
from distlaunch.errors import ExitCode
from distlaunch.launch.attempt import AttemptResult, run_attempt
from distlaunch.launch.observer import Observer, Sturdy
from distlaunch.launch.outcome import Outcome
from distlaunch.launch.signals import SignalPipe
from distlaunch.run_dir import RunDir


def run_job(config: RunConfig, run: RunDir, observer: Observer, environ: Mapping[str, str]) -> AttemptResult:
    """Trains a run, whose lock the caller holds, and starts it again after failures that need not come again."""
    most = max_restarts(config)
    # held over all attempts: a signal between two of them must end the job as well
    with SignalPipe() as signals:
        for number in itertools.count(1):
            result = run_attempt(config, run, "train", observer, environ, signals=signals)
            failure = result.outcome.failure
            if number > most or failure is None or not result.outcome.retryable:
                return result
            if stopped := _stopped_between(signals):
                return dataclasses.replace(result, outcome=stopped)
            Sturdy(observer).note(f"restart {number} of {most}: {failure.task} {failure.reason}")
    raise AssertionError("unreachable")


def _stopped_between(signals: SignalPipe) -> Outcome | None:
    """How the job ends if it was asked to after the last attempt."""
    asked = [number for number in signals.read() if number != signal.SIGCHLD]
    if not asked:
        return None
    if signal.SIGINT in asked:
        return Outcome("interrupted", ExitCode.INTERRUPTED)
    return Outcome("stopped", ExitCode.PREEMPTED)
