"""A candidate whose tasks are kept running: it is measured when it is its turn, and waits otherwise."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import Record, RoundOrder, RoundResult, TrialOrder
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import AttemptResult, run_attempt
from distlaunch.supervise.observer import Silent
from distlaunch.supervise.requests import SignalPipe
from distlaunch.tune.candidates import Candidate
from distlaunch.tune.race import call_length, steps_of_round

_POLL_S = 0.01
_CALLS_IN_ROUND = 4
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
        self.candidate = candidate
        self._run, self._context, self._order = run, context, TrialOrder(num_steps, timed=True)
        self._round_s, self._poll = round_s, poll
        self._stops = SignalPipe()
        self._ended: AttemptResult | BaseException | None = None
        self._number, self._step_s, self._steps_per_call = 0, 0.0, 1
        self._thread = threading.Thread(target=self._supervise, name=candidate.name, daemon=True)

    @staticmethod
    def run_dir(folder: Path, reference: RunDir) -> RunDir:
        """Return a new run directory with the checkpoints of the reference, without copying their data."""
        run = RunDir.claim(folder, "candidate")
        shutil.copytree(reference.checkpoints, run.checkpoints, copy_function=os.link, dirs_exist_ok=True)
        return run

    def start(self) -> None:
        self._thread.start()

    def _supervise(self) -> None:
        try:
            with self._run.lock():
                self._ended = run_attempt(
                    self.candidate.trial_config, self._run, "verify", Silent(), self._context,
                    extra=("--trial", self._order.to_json()), signals=self._stops,
                )  # fmt: skip
        except BaseException as error:  # the main thread reports it
            self._ended = error

    def is_ready(self) -> bool:
        """Return True if the recorded steps have been trained, so that rounds may begin.

        Raises:
            ContestantFailed: the tasks have ended.
        """
        return self._result(0) is not None

    def prepare(self) -> None:
        """Choose the length of calls, check the numbers of such calls, and run them once."""
        result = self._result(0)
        assert result is not None, "the contestant is ready"
        self._step_s = result.step_s
        self._set_call_length()
        self._run_round(self._steps_per_call, checks_calls=True)
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

    def _run_round(self, num_steps: int, *, checks_calls: bool = False) -> float:
        self._number += 1
        RoundOrder(self._number, num_steps, self._steps_per_call, checks_calls).write(self._run.round_order(_ATTEMPT))
        while (result := self._result(self._number)) is None:
            self._poll()
            time.sleep(_POLL_S)
        return result.step_s

    def _result(self, number: int) -> RoundResult | None:
        """Return the result of a round, or None if it has not ended yet."""
        ended = not self._thread.is_alive()
        result = RoundResult.read(self._run.round_result(_ATTEMPT))
        if result is not None and result.number >= number:
            return result
        if ended and self._ended is not None:
            raise ContestantFailed(self._ended)
        return None

    def record(self) -> Record:
        """Return the record of the steps that were trained before the rounds."""
        return Record.read(self._run.record(_ATTEMPT))

    def memory_bytes(self) -> int:
        """Return the resident memory of all tasks after their latest round."""
        found = 0
        for files in self._run.tasks(_ATTEMPT).values():
            if files.memory.exists():
                found += int(files.memory.read_text())
        return found

    def ask_to_stop(self) -> None:
        """Ask the tasks to end, without waiting."""
        self._stops.put_back([signal.SIGTERM])

    def close(self) -> None:
        """Wait until no task is left, and remove the files."""
        if self._thread.ident is not None:
            self._thread.join()
        self._stops.close()
        shutil.rmtree(self._run.path, ignore_errors=True)
