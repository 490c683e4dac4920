"""Runs the trials of `distlaunch verify`, and the references that they are compared with."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import StopRequested
from distlaunch.base.judge import Judgement, judge
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import Record, TrialOrder
from distlaunch.config.run import RunConfig
from distlaunch.jobs.attempt import AttemptResult, checked, run_attempt
from distlaunch.jobs.choose_run import Choice
from distlaunch.supervise.observer import Silent
from distlaunch.supervise.requests import SignalPipe
from distlaunch.verify.trials import PlannedTrial, reference_config


class Ended(Exception):  # noqa: N818 (no error)
    """The user has ended the command, or the reference has failed."""

    def __init__(self, result: AttemptResult | None, code: int | None) -> None:
        self.result, self.code = result, code


@dataclass(frozen=True)
class Compared:
    """A completed trial, its reference, and the result of comparing them.

    Attributes:
        dense: the judgement against the reference with dense gradients; None if there is no such reference.
    """

    record: Record
    reference: Record
    judgement: Judgement
    dense: Judgement | None = None

    @property
    def equal(self) -> bool:
        return self.judgement.equal or (self.dense is not None and self.dense.equal)


@dataclass(frozen=True)
class _Reference:
    run: RunDir
    record: Record


class TrialRunner:
    """Runs trials as attempts in the run directory of their reference, which is trained when it is first needed.

    Args:
        folder: where the run directories are created.

    Attributes:
        reference: the record of the unchanged model.
        reference_run: the run directory with its checkpoints: step 0 has the initial weights of all trials.
    """

    def __init__(self, choice: Choice, order: TrialOrder, folder: Path, signals: SignalPipe) -> None:
        self._choice, self._folder, self._signals = choice, folder, signals
        self._config = reference_config(choice.config)
        self._references: dict[TrialOrder, _Reference | AttemptResult] = {}
        found = self._reference(order)
        if isinstance(found, AttemptResult):
            # raises errors in the config, with their lines
            checked(found, choice.locate)
            raise Ended(found, None)
        self.reference, self.reference_run = found.record, found.run

    def compare(self, planned: PlannedTrial, order: TrialOrder) -> Compared | AttemptResult:
        """Run a trial and return its judgement, or the attempt that has failed, which may be the reference's.

        Raises:
            DistlaunchError: the trial cannot be started.
        """
        reference = self._reference(order)
        if isinstance(reference, AttemptResult):
            return reference
        dense = reference.record.dense is not None and planned.config.strategy.is_functional
        result = self._attempt(planned.config, reference.run, dataclasses.replace(order, dense=dense))
        if result.outcome.failure is not None or result.outcome.problems:
            return result
        record = Record.read(reference.run.record(result.plan.attempt))
        expected = reference.record
        of_dense = None
        if record.dense is not None and expected.dense is not None:
            of_dense = judge(record.dense, expected.dense, expected.noise, expected.rows)
        judgement = judge(record.series, expected.series, expected.noise, expected.rows)
        return Compared(record, expected, judgement, of_dense)

    def _reference(self, order: TrialOrder) -> _Reference | AttemptResult:
        order = dataclasses.replace(order, synchronized=False)  # no effect on one device, which has the whole batch
        # one reference for each TrialOrder: what a trial leaves out, its reference leaves out too
        if order not in self._references:
            run = RunDir.claim(self._folder, "verify")
            result = self._attempt(self._config, run, dataclasses.replace(order, reference=True))
            done = result.outcome.status == "done"
            self._references[order] = _Reference(run, Record.read(run.record(result.plan.attempt))) if done else result
        return self._references[order]

    def _attempt(self, config: RunConfig, run: RunDir, order: TrialOrder) -> AttemptResult:
        self._stop_if_asked()
        extra = ("--trial", order.to_json())
        with run.lock():
            try:
                context = self._choice.context
                result = run_attempt(config, run, "verify", Silent(), context, extra=extra, signals=self._signals)
            except StopRequested as asked:
                raise Ended(None, 128 + asked.number) from None
        if result.outcome.status in ("interrupted", "stopped"):
            raise Ended(None, 128 + (result.outcome.stopped_by or signal.SIGTERM))
        return result

    def _stop_if_asked(self) -> None:
        # SIGCHLD is for the supervisor, and is ignored between attempts
        asked = [number for number in self._signals.read() if number != signal.SIGCHLD]
        if asked:
            raise Ended(None, 128 + (signal.SIGINT if signal.SIGINT in asked else asked[0]))
