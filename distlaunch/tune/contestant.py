"""The reference, and candidates whose tasks are kept running: each is measured in its turn, and waits otherwise."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from distlaunch.base.call_length import BLOCK_STEPS, steps_in_call
from distlaunch.base.errors import DistlaunchError
from distlaunch.base.run_dir import RunDir, checkpoint_name, link_or_copy
from distlaunch.base.run_files.trial_records import MemoryReport, Record, RoundOrder, RoundResult, TrialOrder
from distlaunch.config.run import RunConfig
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import AttemptResult, run_attempt
from distlaunch.supervise.allocation import Starter
from distlaunch.supervise.observer import Silent
from distlaunch.supervise.requests import SignalPipe
from distlaunch.tune.candidates import Candidate
from distlaunch.tune.race import steps_of_round
from distlaunch.verify.trials import reference_config

_POLL_S = 0.01
_CALLS_IN_ROUND = 2
_READ_AHEAD = 4
"""Batches that may be ready when a round begins, in addition to one for each core."""
_READING_S = 5.0
"""Limit on the untimed steps that use up these batches, in seconds."""
_WAITS = 0.05
"""Share of waiting for input from which each round begins with such steps."""
_PREPARE_LIMIT = 5
"""Limit on the time for longer calls, which compile too, as a factor of the time for the recorded steps."""
_ROUND_LIMIT_S, _ROUND_LIMIT = 60.0, 50
"""Limits on the duration of a round, in seconds and as a factor of the expected duration; the larger one counts."""
_ATTEMPT = 0
"""Each trial has its own run directory, with one attempt."""


class TrialFailed(Exception):  # noqa: N818 (no error of this program)
    """The tasks of a candidate, or of the reference, have ended.

    Attributes:
        result: the failed attempt, or the error that prevented it.
    """

    def __init__(self, result: AttemptResult | BaseException) -> None:
        super().__init__(result)
        self.result = result


class TrialTasks:
    """The tasks of a trial in its own run directory. A thread supervises them.

    Attributes:
        starter: the way to send orders to the tasks; None before the first task starts.
        ended: the end of the attempt; None if it has not ended.
    """

    def __init__(self, config: RunConfig, run: RunDir, context: LaunchContext, order: TrialOrder) -> None:
        self._config, self._run, self._context, self._order = config, run, context, order
        self._stops = SignalPipe()
        self.starter: Starter | None = None
        self.ended: AttemptResult | BaseException | None = None
        self._thread = threading.Thread(target=self._supervise, name=run.path.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _supervise(self) -> None:
        try:
            with self._run.lock():
                self.ended = run_attempt(
                    self._config, self._run, "verify", Silent(), self._context,
                    extra=("--trial", self._order.to_json()), signals=self._stops, on_start=self.take_starter,
                )  # fmt: skip
        except BaseException as error:  # the main thread reports it
            self.ended = error

    def take_starter(self, starter: Starter) -> None:
        """Set the starter through which orders reach the tasks."""
        self.starter = starter

    @property
    def have_ended(self) -> bool:
        """Whether no task is left."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """Ask the tasks to end, without waiting."""
        self._stops.put_back([signal.SIGTERM])

    def close(self) -> None:
        """Wait until no task is left."""
        if self._thread.ident is not None:
            self._thread.join()
        self._stops.close()


class Reference:
    """The trial of the unchanged model on one device, in the precision of the config.

    It measures its rounding noise last, and candidates may start meanwhile.

    Args:
        run: its run directory.
        num_steps: number of recorded steps.
    """

    def __init__(self, config: RunConfig, run: RunDir, context: LaunchContext, num_steps: int) -> None:
        own = reference_config(config, keeps_precision=True)
        self.run, self._num_steps = run, num_steps
        self._tasks = TrialTasks(own, run, context, TrialOrder(num_steps, reference=True))
        # checkpoints of hosts without a shared disk are not here before the end
        self._starts_candidates = context.engine.uses_this_machine_only
        self.start, self.ask_to_stop, self.close = self._tasks.start, self._tasks.ask_to_stop, self._tasks.close

    def has_checkpoints(self) -> bool:
        """Return True if its checkpoints are written, from which candidates start and with which they are compared."""
        written = self._starts_candidates and self._num_steps in self.run.checkpoint_steps()
        return written or self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether its task has ended."""
        return self._tasks.have_ended

    def record(self) -> Record | None:
        """Return its record, or None if it has not ended yet.

        Raises:
            TrialFailed: it has failed.
        """
        if not self.has_ended:
            return None
        ended = self._tasks.ended
        if isinstance(ended, AttemptResult) and ended.outcome.status == "done":
            return Record.read(self.run.record(_ATTEMPT))
        assert ended is not None, "the thread has ended"
        raise TrialFailed(ended)


class Contestant:
    """A candidate with its running tasks.

    Args:
        run: the candidate's own run directory, with the checkpoints of the reference.
        num_steps: number of recorded steps.
        round_s: the duration of a round.
        num_cores: number of cores of a host.
        poll: called while waiting; it raises an exception to give up.

    Attributes:
        tasks: its tasks.
        step_s: the duration of a step in the latest round, in seconds.
    """

    def __init__(
        self, candidate: Candidate, run: RunDir, context: LaunchContext, num_steps: int, round_s: float,
        num_cores: int, poll: Callable[[], None],
    ) -> None:  # fmt: skip
        self.candidate, self.context, self.run = candidate, context, run
        self.tasks = TrialTasks(candidate.trial_config, run, context, TrialOrder(num_steps, timed=True))
        self._round_s, self._num_ready, self._poll = round_s, num_cores + _READ_AHEAD, poll
        self._number, self.step_s, self._steps_per_call, self._waits = 0, 0.0, 1, False
        self._began = self._limit_s = self._answer_until = math.inf
        self.ask_to_stop = self.tasks.ask_to_stop

    def start(self) -> None:
        self._began = time.monotonic()
        self.tasks.start()

    @staticmethod
    def run_dir(reference: RunDir, num_steps: int) -> RunDir:
        """Return a new run directory with two checkpoints of the reference, whose files are linked if possible.

        Args:
            num_steps: number of recorded steps. The checkpoints are those before and after these steps.
        """
        # a new parent folder: a host that does not share this disk makes it too, and removes it when it is empty
        run = RunDir.claim(Path(tempfile.mkdtemp(prefix="distlaunch-tune-")), "candidate")
        for step in (0, num_steps):
            name = checkpoint_name(step)
            shutil.copytree(reference.checkpoints / name, run.checkpoints / name, copy_function=link_or_copy)
        return run

    def is_prepared(self) -> bool:
        """Return True if rounds may begin. Call this again and again until then; it never waits.

        After the recorded steps, the tasks train the same steps in longer calls, and run a round that does not count.

        Raises:
            TrialFailed: the tasks have ended, or the longer calls take much longer than the recorded steps.
        """
        if self._number == 0:
            result = self._result(0)
            if result is not None:
                self.step_s = result.step_s
                self._set_call_length()
                self._order_round(_PREPARE_LIMIT * (time.monotonic() - self._began), checks_calls=True)
            return False
        result = self._answer()
        if result is not None:
            self.step_s, self._waits = result.step_s, result.waits > _WAITS
        return result is not None

    def measure(self) -> float:
        """Run a round and return the duration of a step in seconds.

        Raises:
            TrialFailed: the tasks have ended, or have not answered in time.
        """
        self._order_round()
        while (result := self._answer()) is None:
            self._poll()
            time.sleep(_POLL_S)
        self.step_s = result.step_s
        return self.step_s

    def _set_call_length(self) -> None:
        wanted = self.candidate.steps_per_call
        if isinstance(wanted, int):
            self._steps_per_call = wanted
            return
        # calls are longer in training; shorter ones differ little, unless DTensor makes its steps one by one in them
        shorter = steps_in_call(self.step_s, target_s=self._round_s / _CALLS_IN_ROUND)
        self._steps_per_call = max(shorter, min(BLOCK_STEPS, steps_in_call(self.step_s)))

    def _order_round(self, least_s: float = 0.0, *, checks_calls: bool = False) -> None:
        """Tell the tasks to run a round.

        Args:
            least_s: time that it may take in any case.
        """
        assert self.tasks.starter is not None, "the tasks have answered before"
        self._number += 1
        num_steps = steps_of_round(self.step_s, self._steps_per_call, self._round_s)
        untimed = self._steps_per_call
        if checks_calls or self._waits:
            # batches that are ready, because the candidate was waiting, would hide that input is slow
            fitting = int(_READING_S / max(self.step_s, 1e-6))
            untimed *= max(1, -(-min(self._num_ready, fitting) // untimed))
        path = self.run.round_order(_ATTEMPT)
        RoundOrder(self._number, num_steps, self._steps_per_call, untimed, checks_calls).write(path)
        self.tasks.starter.send_file(path)
        self._limit_s = max(_ROUND_LIMIT_S, least_s, _ROUND_LIMIT * num_steps * self.step_s)
        self._answer_until = time.monotonic() + self._limit_s

    def _answer(self) -> RoundResult | None:
        """Return the result of the last round; None if it has not ended yet."""
        result = self._result(self._number)
        if result is None and time.monotonic() > self._answer_until:
            self.ask_to_stop()
            raise TrialFailed(DistlaunchError(f"a round had no result after {self._limit_s:,.0f} s"))
        return result

    def _result(self, number: int) -> RoundResult | None:
        """Return the result of a round, or None if it has not ended yet."""
        have_ended = self.tasks.have_ended  # before the last result is read
        try:
            result = RoundResult.read(self.run.round_result(_ATTEMPT))
        except ValueError as error:
            self.ask_to_stop()
            raise TrialFailed(DistlaunchError(f"the result of a round cannot be read: {error}")) from None
        if result is not None and result.number >= number:
            return result
        if have_ended and self.tasks.ended is not None:
            raise TrialFailed(self.tasks.ended)
        return None

    def record(self) -> Record:
        """Return the record of the steps that were trained before the rounds.

        Raises:
            TrialFailed: another host has sent something else.
        """
        try:
            return Record.read(self.run.record(_ATTEMPT))
        except (OSError, ValueError, TypeError, LookupError) as error:
            self.ask_to_stop()
            raise TrialFailed(DistlaunchError(f"the record of its steps cannot be read: {error}")) from None

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
        """Whether no task is left."""
        return self.tasks.have_ended

    def close(self) -> None:
        """Wait until no task is left, and remove the files."""
        self.tasks.close()
        shutil.rmtree(self.run.path.parent, ignore_errors=True)
