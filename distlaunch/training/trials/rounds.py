"""Rounds of a timed trial: the task waits for orders of `distlaunch tune`, and runs and times some steps for each.

All candidates are kept ready at the same time and take turns, so that other work slows all of them equally.
"""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import replace
from pathlib import Path

import psutil

from distlaunch.base.errors import CheckpointError
from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import MemoryReport, Record, RoundOrder, RoundResult, TrialOrder
from distlaunch.cluster.cgroup import available_memory
from distlaunch.strategies.coordination import Vote
from distlaunch.strategies.state import State
from distlaunch.training.session import Session
from distlaunch.training.step_reports import scalars
from distlaunch.training.trials.recorder import Stopped, Trial, training_source, with_deviations

_POLL_S = 0.05  # short beside a round, and long enough to leave the cores to the candidate that is measured
_FEWER_STEPS = 3
"""Largest factor by which a round is shortened."""


class Rounds:
    """The part of one task in the rounds of a trial that has been recorded.

    Args:
        attempt: the number of the trial's attempt.
        memory: the file for the memory of this task.
    """

    def __init__(self, trial: Trial, order: TrialOrder, session: Session, attempt: int, process: Process,
                 memory: Path) -> None:  # fmt: skip
        run = session.run
        self._trial, self._order, self._session, self._process = trial, order, session, process
        self._orders, self._results, self._record = (
            run.round_order(attempt), run.round_result(attempt), run.record(attempt)
        )  # fmt: skip
        self._memory = memory
        self._is_chief = session.strategy.is_chief
        self._batches_of_pass: int | None = None
        self._num_read = 0  # steps since the data was read from its beginning
        self._has_crossed_end = False

    @classmethod
    def of(cls, trial: Trial, order: TrialOrder, session: Session, attempt: int, task: str, process: Process) -> Rounds:
        """Return the rounds of a task of the trial's run."""
        return cls(trial, order, session, attempt, process, RunDir(session.run.path).task(attempt, task).memory)

    def follow(self) -> None:
        """Run rounds until asked to stop; every task calls this.

        Raises:
            Stopped: on request, which is the only end.
        """
        # the first step compiles, and the second may still allocate
        step_s = self._trial.step_s[2:] or self._trial.step_s
        self._report(RoundResult(0, statistics.median(step_s)))
        self._session.program.skip_warmup()
        done = 0
        while True:
            order = RoundOrder.read(self._orders)
            if order is None or order.number <= done:
                if self._process.should_stop():
                    raise Stopped
                time.sleep(_POLL_S)
                continue
            if order.checks_calls:
                self._check_calls(order.steps_per_call)
            num_steps = self._avoid_end_of_pass(order)
            self._run(order.untimed_steps, order.steps_per_call)
            began = time.perf_counter()
            waited_s = self._run(num_steps, order.steps_per_call)
            seconds, done = time.perf_counter() - began, order.number
            self._report(RoundResult(done, seconds / num_steps, waited_s / seconds))

    def _report(self, result: RoundResult) -> None:
        resident = psutil.Process().memory_info().rss
        MemoryReport(socket.gethostname(), resident, available_memory()).write(self._memory)
        if self._is_chief:
            result.write(self._results)

    def _check_calls(self, steps_per_call: int) -> None:
        """Train the steps of the record again in longer calls, and record the deviations of the final weights."""
        initial, self._trial.initial = self._trial.initial, None  # not needed again: frees the memory
        assert initial is not None, "the trial has been recorded, and calls are checked once"
        self._read_from_beginning()
        program = self._session.program
        program.restore(initial)
        self._run(self._order.steps, steps_per_call)
        final: State = program.snapshot()
        if self._is_chief:
            record, expected = Record.read(self._record), self._session.store.load(self._order.steps).state
            replace(record, series=with_deviations(record.series, final, expected)).write(self._record)

    def _avoid_end_of_pass(self, order: RoundOrder) -> int:
        """Return the number of timed steps of a round, which end before the last batch of the pass.

        XLA compiles the step again for a smaller last batch, which would take most of the time of a round. So the data
        is read from its beginning where the round would cross the end. If a pass is much shorter than a round, its end
        is crossed once before.
        """
        length = self._batches_of_pass
        if length is None or self._num_read + order.untimed_steps + order.num_steps < length:
            return order.num_steps
        if num_steps := steps_within_pass(order, length):
            self._read_from_beginning()
            return num_steps
        if not self._has_crossed_end:
            self._run(max(1, length + 1 - self._num_read), order.steps_per_call)
            self._has_crossed_end = True
        return order.num_steps

    def _read_from_beginning(self) -> None:
        source = training_source(self._session)
        self._session.program.set_train_data(source)
        self._batches_of_pass, self._num_read = source.num_batches, 0

    def _run(self, num_steps: int, steps_per_call: int) -> float:
        """Run steps in calls of a given length, as the training loop does.

        Returns:
            The seconds in which this process has waited for input.
        """
        program, left, waited_s = self._session.program, num_steps, 0.0
        program.reset_metrics()
        while left:
            result = program.run_steps(min(steps_per_call, left), Vote(stop=self._process.should_stop()))
            if result.vote.stop:
                raise Stopped
            if not result.steps:
                raise CheckpointError("the training data ended; it must be possible to read it more than once")
            scalars(result.logs)
            left -= result.steps
            self._num_read += result.steps
            waited_s += result.times.input_s
        return waited_s


def steps_within_pass(order: RoundOrder, length: int) -> int:
    """Return how many timed steps a round from the beginning of a pass has; 0 if too few of them fit.

    Args:
        length: number of batches of a pass. The last one may be smaller.
    """
    calls = (length - 1 - order.untimed_steps) // order.steps_per_call
    fitting = min(order.num_steps, calls * order.steps_per_call)
    return fitting if fitting * _FEWER_STEPS >= order.num_steps else 0
