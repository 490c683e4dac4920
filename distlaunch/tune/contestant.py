"""A candidate whose tasks are kept running: it is measured when it is its turn, and waits otherwise."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distlaunch.base.errors import DistlaunchError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import MemoryReport, Record, RoundOrder, RoundResult, TrialOrder
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import AttemptResult, run_attempt
from distlaunch.supervise.allocation import Starter
from distlaunch.supervise.observer import Silent
from distlaunch.supervise.requests import SignalPipe
from distlaunch.tune.candidates import Candidate
from distlaunch.tune.race import call_length, steps_of_round

_POLL_S = 0.01
_CALLS_IN_ROUND = 4
_ROUND_LIMIT_S, _ROUND_LIMIT = 60.0, 50
"""Limits on the duration of a round, in seconds and as a factor of the expected duration; the larger one counts."""
_ATTEMPT = 0
"""Each contestant has its own run directory, with one attempt."""


class ContestantFailed(Exception):  # noqa: N818 (no error of this program)
    """The tasks of a candidate have ended.

    Attributes:
        result: the failed attempt, or the error that prevented it.
    """

    def __init__(self, result: AttemptResult | BaseException) -> None:
        super().__init__(result)
        self.result = result


class Contestant:
    """The running tasks of a candidate. A thread supervises them.

    Args:
        run: the candidate's own run directory, with the checkpoints of the reference.
        num_steps: number of recorded steps.
        round_s: the duration of a round.
        poll: called while waiting; it raises an exception to give up.
    """

    def __init__(
        self, candidate: Candidate, run: RunDir, context: LaunchContext, num_steps: int, round_s: float,
        poll: Callable[[], None],
    ) -> None:  # fmt: skip
        self.candidate, self.context = candidate, context
        self.run, self._order = run, TrialOrder(num_steps, timed=True)
        self._round_s, self._poll = round_s, poll
        self._stops = SignalPipe()
        self._starter: Starter | None = None
        self._ended: AttemptResult | BaseException | None = None
        self._number, self._step_s, self._steps_per_call = 0, 0.0, 1
        self._thread = threading.Thread(target=self._supervise, name=candidate.name, daemon=True)

    @staticmethod
    def run_dir(reference: RunDir) -> RunDir:
        """Return a new run directory with the checkpoints of the reference, without copying their data."""
        # a new parent folder: a host that does not share this disk makes it too, and removes it when it is empty
        run = RunDir.claim(Path(tempfile.mkdtemp(prefix="distlaunch-tune-")), "candidate")
        shutil.copytree(reference.checkpoints, run.checkpoints, copy_function=os.link, dirs_exist_ok=True)
        return run

    def start(self) -> None:
        self._thread.start()

    def _supervise(self) -> None:
        try:
            with self.run.lock():
                self._ended = run_attempt(
                    self.candidate.trial_config, self.run, "verify", Silent(), self.context,
                    extra=("--trial", self._order.to_json()), signals=self._stops, on_start=self.take_starter,
                )  # fmt: skip
        except BaseException as error:  # the main thread reports it
            self._ended = error

    def take_starter(self, starter: Starter) -> None:
        """Set the starter through which orders reach the tasks."""
        self._starter = starter

    def is_ready(self) -> bool:
        """Return True if the recorded steps have been trained, so that rounds may begin.

        Raises:
            ContestantFailed: the tasks have ended.
        """
        return self._result(0) is not None

    def prepare(self, left_s: float) -> None:
        """Choose the length of calls, check the numbers of such calls, and run them once.

        Args:
            left_s: what is left of the budget. The first round compiles the longer calls, so it may take that long.

        Raises:
            ContestantFailed: the tasks have ended, or have not answered in time.
        """
        result = self._result(0)
        assert result is not None, "the contestant is ready"
        self._step_s = result.step_s
        self._set_call_length()
        self._run_round(self._steps_per_call, least_s=left_s, checks_calls=True)
        # the durations so far are those of one-step calls and of the first long call: run a round that does not count
        self.measure()

    def measure(self) -> float:
        """Run a round and return the duration of a step in seconds.

        Raises:
            ContestantFailed: the tasks have ended.
        """
        num_steps = steps_of_round(self._step_s, self._steps_per_call, self._round_s)
        self._step_s = self._run_round(num_steps)
        return self._step_s

    def _set_call_length(self) -> None:
        # a call of `auto` takes half a second in training; shorter ones differ little, and allow more rounds
        wanted = self.candidate.steps_per_call
        self._steps_per_call = call_length(wanted, self._step_s, target_s=self._round_s / _CALLS_IN_ROUND)

    def _run_round(self, num_steps: int, *, least_s: float = 0.0, checks_calls: bool = False) -> float:
        assert self._starter is not None, "the contestant is ready"
        self._number += 1
        path = self.run.round_order(_ATTEMPT)
        RoundOrder(self._number, num_steps, self._steps_per_call, checks_calls).write(path)
        self._starter.send_file(path)
        limit_s = max(_ROUND_LIMIT_S, least_s, _ROUND_LIMIT * num_steps * self._step_s)
        until = time.monotonic() + limit_s
        while (result := self._result(self._number)) is None:
            if time.monotonic() > until:
                self.ask_to_stop()
                raise ContestantFailed(DistlaunchError(f"a round had no result after {limit_s:,.0f} s"))
            self._poll()
            time.sleep(_POLL_S)
        return result.step_s

    def _result(self, number: int) -> RoundResult | None:
        """Return the result of a round, or None if it has not ended yet."""
        ended = not self._thread.is_alive()
        try:
            result = RoundResult.read(self.run.round_result(_ATTEMPT))
        except ValueError as error:
            self.ask_to_stop()
            raise ContestantFailed(DistlaunchError(f"the result of a round cannot be read: {error}")) from None
        if result is not None and result.number >= number:
            return result
        if ended and self._ended is not None:
            raise ContestantFailed(self._ended)
        return None

    def record(self) -> Record:
        """Return the record of the steps that were trained before the rounds.

        Raises:
            ContestantFailed: another host has sent something else.
        """
        try:
            return Record.read(self.run.record(_ATTEMPT))
        except (OSError, ValueError, TypeError, LookupError) as error:
            self.ask_to_stop()
            raise ContestantFailed(DistlaunchError(f"the record of its steps cannot be read: {error}")) from None

    def memory(self) -> list[MemoryReport]:
        """Return the reports of the tasks after their latest rounds."""
        found = list[MemoryReport]()
        for files in self.run.tasks(_ATTEMPT).values():
            # a damaged report is left out: reports are only shown, and another host may have sent this one
            with contextlib.suppress(ValueError):
                found += filter(None, [MemoryReport.read(files.memory)])
        return found

    @property
    def has_ended(self) -> bool:
        """Return True if no task is left."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """Ask the tasks to end, without waiting."""
        self._stops.put_back([signal.SIGTERM])

    def close(self) -> None:
        """Wait until no task is left, and remove the files."""
        if self._thread.ident is not None:
            self._thread.join()
        self._stops.close()
        shutil.rmtree(self.run.path.parent, ignore_errors=True)
