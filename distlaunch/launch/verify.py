"""`distlaunch verify`: trains a config for a few steps under each strategy, and compares with one device."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from distlaunch.cluster.devices import find_gpus
from distlaunch.config.run import RunConfig
from distlaunch.errors import DistlaunchError, ExitCode, UsageError
from distlaunch.launch.attempt import AttemptResult, run_attempt
from distlaunch.launch.causes import dense_embeddings, explain
from distlaunch.launch.job import Choice, Request, checked, choose
from distlaunch.launch.judgement import Judgement, first_not_a_number, judge
from distlaunch.launch.observer import Silent
from distlaunch.launch.plan import REMOVED_ENV
from distlaunch.launch.signals import SignalPipe
from distlaunch.launch.trial_plan import KINDS, REPLICAS, PlannedTrial, plan_trials, reference_config
from distlaunch.run_dir import RunDir
from distlaunch.trials import Record, TrialOrder

EQUAL, DIFFERS, DOCUMENTED, FAILED = "equal", "differs", "differs as documented", "failed"
NOT_COMPARED, CANNOT_RUN = "not compared", "cannot run"
_MESH_KINDS = ("dtensor", "jax")
"""Gradients are dense there."""


@dataclass(frozen=True)
class VerifyRequest:
    """What the user asks for.

    Attributes:
        keep: a new directory for everything that the trials leave; None: it is deleted.
    """

    target: str
    overrides: tuple[str, ...] = ()
    steps: int = 30
    kinds: Sequence[str] = KINDS
    replicas: Sequence[int] = REPLICAS
    keep: str | None = None


@dataclass(frozen=True)
class Row:
    """One trial and what came of it; `reasons` are sentences."""

    planned: PlannedTrial
    verdict: str
    reasons: tuple[str, ...] = ()
    judgement: Judgement | None = None
    seconds: float | None = None

    @property
    def proven(self) -> bool:
        """Whether it was compared and gives one device's numbers."""
        return self.verdict in (EQUAL, DOCUMENTED) and self.judgement is not None and self.judgement.equal


@dataclass
class VerifyResult:
    """All rows.

    Attributes:
        reference: None if it was not trained to its end; then `failed` holds its attempt.
        interrupted: the exit code, if the user ended it.
    """

    steps: int
    rows: list[Row] = field(default_factory=list)
    reference: Record | None = None
    failed: AttemptResult | None = None
    interrupted: ExitCode | None = None

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted is not None:
            return self.interrupted
        if self.failed is not None:
            return self.failed.outcome.exit_code
        bad = any(row.verdict in (DIFFERS, FAILED) for row in self.rows)
        return ExitCode.DONE if any(row.proven for row in self.rows) and not bad else ExitCode.DIFFERS


class _Ended(Exception):  # noqa: N818 (no error)
    """The user has ended the command, or the reference has failed."""

    def __init__(self, result: AttemptResult | None, code: ExitCode | None) -> None:
        self.result, self.code = result, code


def verify(
    request: VerifyRequest, environ: Mapping[str, str], tell: Callable[[Row], None], note: Callable[[str], None]
) -> VerifyResult:
    """Makes all trials, one after the other.

    Args:
        tell: gets each row as soon as it is known.

    Raises:
        ConfigError: the config is wrong, be it that the reference found out.
        UsageError: the request cannot be fulfilled.
    """
    environ = {name: value for name, value in environ.items() if name not in REMOVED_ENV}
    if Path(request.target).is_dir():
        raise UsageError(f"{request.target} is a directory; expected a config file")
    choice = choose(Request(request.target, (*request.overrides, "resume=never")), environ)
    planned = plan_trials(choice.config, request.kinds, request.replicas, len(find_gpus(environ)))
    result = VerifyResult(request.steps)
    with _folder(request.keep) as folder, SignalPipe() as signals:
        try:
            note(f"one device, {request.steps} steps: the reference and its rounding noise")
            bench = _Bench(request, choice, environ, folder, signals)
            result.reference = bench.reference
            for each in planned:
                row = bench.try_out(each)
                result.rows.append(row)
                tell(row)
        except _Ended as ended:
            result.failed, result.interrupted = ended.result, ended.code
    return result


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="distlaunch-verify-") as name:
            yield Path(name)
        return
    folder = Path(keep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--keep: got {keep}, which is there already; name a directory that is new or empty")
    yield folder


class _Bench:
    """Makes trials: each an attempt in one run directory, compared with one reference, which is trained at once."""

    def __init__(
        self, request: VerifyRequest, choice: Choice, environ: Mapping[str, str], folder: Path, signals: SignalPipe
    ) -> None:
        self._request, self._environ, self._signals = request, environ, signals
        self._run = RunDir.claim(folder, "verify")
        result = self._attempt(reference_config(choice.config), TrialOrder(request.steps, reference=True))
        checked(result, choice.locate)
        if result.outcome.status != "done":
            raise _Ended(result, None)
        self.reference = Record.read(self._run.record(result.plan.attempt))

    def try_out(self, planned: PlannedTrial) -> Row:
        """Runs one trial and judges it."""
        if planned.verdict:
            return Row(planned, planned.verdict, (planned.reason,))
        began = time.monotonic()
        dense = self.reference.dense is not None and planned.kind in _MESH_KINDS
        try:
            result = self._attempt(planned.config, TrialOrder(self._request.steps, dense=dense))
        except DistlaunchError as error:  # too few GPUs, no ports
            return Row(planned, CANNOT_RUN, (str(error),))
        row = self._row(planned, result)
        return dataclasses.replace(row, seconds=time.monotonic() - began)

    def _row(self, planned: PlannedTrial, result: AttemptResult) -> Row:
        if result.outcome.problems:
            return Row(planned, CANNOT_RUN, tuple(map(str, result.outcome.problems)))
        failure = result.outcome.failure
        if failure is not None:
            where = f" (its log: {failure.log})" if failure.log and self._request.keep else ""
            last = failure.detail[-1].strip() if failure.detail else ""
            reason = failure.reason if not last or last in failure.reason else f"{failure.reason}: {last}"
            return Row(planned, FAILED, (f"{failure.task} {reason}{where}",))
        record, reference = Record.read(self._run.record(result.plan.attempt)), self.reference
        judgement = judge(record.series, reference.series, reference.noise, reference.rows)
        verdict, reasons = _verdict(planned, reference, record, judgement)
        if verdict == DIFFERS and record.dense is not None and reference.dense is not None:
            dense = judge(record.dense, reference.dense, reference.noise, reference.rows)
            if dense.equal:
                verdict, reasons, judgement = DOCUMENTED, (dense_embeddings(reference.facts.embeddings),), dense
        return Row(dataclasses.replace(planned, replicas=record.replicas), verdict, reasons, judgement)

    def _attempt(self, config: RunConfig, order: TrialOrder) -> AttemptResult:
        self._stop_if_asked()
        extra = ("--trial", order.to_json())
        with self._run.lock():
            result = run_attempt(
                config, self._run, "verify", Silent(), self._environ, extra=extra, signals=self._signals
            )
        if result.outcome.status in ("interrupted", "stopped"):
            raise _Ended(None, result.outcome.exit_code)
        return result

    def _stop_if_asked(self) -> None:
        asked = [number for number in self._signals.read() if number != signal.SIGCHLD]
        if asked:
            raise _Ended(None, ExitCode.INTERRUPTED if signal.SIGINT in asked else ExitCode.PREEMPTED)


def _verdict(
    planned: PlannedTrial, reference: Record, record: Record, judgement: Judgement
) -> tuple[str, tuple[str, ...]]:
    if (step := first_not_a_number(reference.series)) is not None:
        return DIFFERS, (f"one device itself comes to a loss or gradients that are no number in step {step}",)
    if judgement.equal:
        return EQUAL, ()
    reasons = explain(planned, judgement, record, reference)
    if judgement.weights_differ and record.series.worst_weight and not reasons:
        reasons = (f"the cause is not known; the weight that deviates most is {record.series.worst_weight}",)
    return DIFFERS, reasons
