"""`distlaunch verify`: trains a config for a few steps under each strategy, and compares with one device."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from distlaunch.agent.messages import LOST_HOST
from distlaunch.base.compat import frameworks, untested
from distlaunch.base.errors import DistlaunchError, ExitCode, UsageError
from distlaunch.base.judge import Judgement, first_not_a_number
from distlaunch.base.plural import joined
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import Record, TrialOrder
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.base import Local
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import AttemptResult, import_ahead
from distlaunch.jobs.choose_run import JobRequest, choose
from distlaunch.jobs.isolation import isolate_if_configured
from distlaunch.plan.train import REMOVED_ENV
from distlaunch.supervise.requests import SignalPipe
from distlaunch.verify.counter_trials import causes
from distlaunch.verify.explain import dense_embeddings, weight_within_noise
from distlaunch.verify.run_trials import Compared, Ended, TrialRunner
from distlaunch.verify.trials import CANNOT_RUN, KINDS, REPLICAS, PlannedTrial, plan_trials

EQUAL, DIFFERS, DOCUMENTED, FAILED = "equal", "differs", "differs as documented", "failed"


@dataclass(frozen=True)
class VerifyRequest:
    """A request to verify a config.

    Attributes:
        keep: a new directory for the files of the trials, or None to delete them.
    """

    target: str
    overrides: tuple[str, ...] = ()
    steps: int = 30
    kinds: Sequence[str] = KINDS
    replicas: Sequence[int] = REPLICAS
    keep: str | None = None


@dataclass(frozen=True)
class Row:
    """The result of a trial; `reasons` are sentences."""

    planned: PlannedTrial
    verdict: str
    reasons: tuple[str, ...] = ()
    judgement: Judgement | None = None
    seconds: float | None = None

    @property
    def proven(self) -> bool:
        """Return True if the trial was compared and gives the numbers of one device."""
        return self.verdict in (EQUAL, DOCUMENTED) and self.judgement is not None and self.judgement.equal


@dataclass
class VerifyResult:
    """The result of all trials.

    Attributes:
        reference: the record of the training on one device; None if that training failed.
        failed: the result of that training if it failed.
        interrupted: the exit code if the user interrupted the command.
    """

    steps: int
    rows: list[Row] = field(default_factory=list)
    reference: Record | None = None
    failed: AttemptResult | None = None
    interrupted: int | None = None

    @property
    def exit_code(self) -> int:
        if self.interrupted is not None:
            return self.interrupted
        if self.failed is not None:
            return self.failed.outcome.exit_code
        if any(row.verdict in (DIFFERS, FAILED) for row in self.rows):
            return ExitCode.DIFFERS
        return ExitCode.DONE if any(row.proven for row in self.rows) else ExitCode.USAGE


def verify(
    request: VerifyRequest, machine: Machine, on_row: Callable[[Row], None], note: Callable[[str], None]
) -> VerifyResult:
    """Run all trials, one after the other.

    Args:
        on_row: called with each row as soon as it is known.

    Raises:
        ConfigError: the config is wrong, even if this shows only when the reference is trained.
        UsageError: the request cannot be fulfilled.
    """
    # trials start their own clusters, whatever TF_CONFIG says
    machine = machine.without_variables(REMOVED_ENV)
    if Path(request.target).is_dir():
        raise UsageError(f"{request.target} is a directory; expected a config file")
    choice = choose(JobRequest(request.target, (*request.overrides, "resume=never"), makes_run_dir=False), machine)
    # strategies are compared on this machine, whichever hosts the config has
    here = Local(kind="local", warm_start=choice.config.engine.warm_start)
    config = choice.config.model_copy(update={"engine": here})
    choice = dataclasses.replace(choice, config=config, context=LaunchContext.resolve(config, machine))
    isolate_if_configured(choice.config, choice.context)
    if choice.config.data.sharding == "function":
        message = "data.sharding: got 'function': each worker trains on its own examples, in batches that one device"
        raise UsageError(f"{message} never sees, so there is nothing to compare. Use 'rows' to verify the model")
    planned = plan_trials(choice.config, request.kinds, request.replicas, len(machine.gpus))
    result = VerifyResult(request.steps)
    backends = [choice.config.strategy.backend, *(each.config.strategy.backend for each in planned if not each.verdict)]
    for warning in untested(dict.fromkeys(package for backend in backends for package in frameworks(backend))):
        note(f"warning: {warning}")
    # one warm process for all trials of a backend
    with _folder(request.keep) as folder, SignalPipe() as signals, choice.context.engine:
        try:
            order, runner = TrialOrder(request.steps), None
            if not all(each.verdict for each in planned):  # otherwise nothing needs the reference
                note(f"one device, {request.steps} steps: the reference and its rounding noise")
                for each in planned:  # JAX is imported while earlier trials still train on TensorFlow
                    if not each.verdict:
                        import_ahead(each.config, RunDir(folder), "verify", choice.context)
                runner = TrialRunner(choice, order, folder, signals)
                result.reference = runner.reference
            for each in planned:
                row = _try_out(runner, each, order, keeps=request.keep is not None)
                result.rows.append(row)
                on_row(row)
        except Ended as ended:
            result.failed, result.interrupted = ended.result, ended.code
    return result


@contextmanager
def _folder(keep: str | None) -> Generator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="distlaunch-verify-") as name:
            yield Path(name)
        return
    folder = Path(keep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--keep: got {keep}, which already exists; expected a new or empty directory")
    yield folder


def _try_out(runner: TrialRunner | None, planned: PlannedTrial, order: TrialOrder, *, keeps: bool) -> Row:
    """Run one trial, judge it, and look for the cause of a deviation."""
    if runner is None or planned.verdict:
        return Row(planned, planned.verdict, (planned.reason,))
    began = time.monotonic()
    try:
        found = runner.compare(planned, order)
    except DistlaunchError as error:  # too few GPUs, no ports
        return Row(planned, CANNOT_RUN, (str(error),))
    row = (
        _failed(planned, found, keeps=keeps)
        if isinstance(found, AttemptResult)
        else _row(runner, planned, order, found)
    )
    return dataclasses.replace(row, seconds=time.monotonic() - began)


def _notes(judgement: Judgement) -> tuple[str, ...]:
    note = weight_within_noise(judgement)
    return (note,) if note else ()


def _failed(planned: PlannedTrial, result: AttemptResult, *, keeps: bool) -> Row:
    if result.outcome.problems:
        return Row(planned, CANNOT_RUN, tuple(map(str, result.outcome.problems)))
    failure = result.outcome.failure
    where = f" (its log: {failure.log})" if failure is not None and failure.log and keeps else ""
    return Row(planned, FAILED, (f"{failure_text(result)}{where}",))


def failure_text(result: AttemptResult) -> str:
    """Return which task of a failed attempt failed and why, with the last line of its error."""
    if result.outcome.problems:
        return "; ".join(map(str, result.outcome.problems))
    failure = result.outcome.failure
    assert failure is not None, "an attempt that is not done has problems or a failure"
    last = failure.detail[-1].strip() if failure.detail else ""
    reason = failure.reason if not last or last in failure.reason else f"{failure.reason}: {last}"
    return f"{failure.task}{':' if reason.startswith(LOST_HOST) else ''} {reason}"


def _row(runner: TrialRunner, planned: PlannedTrial, order: TrialOrder, found: Compared) -> Row:
    planned = dataclasses.replace(planned, replicas=found.record.replicas)
    reference = found.reference
    # checked first, since NaN deviates from everything
    if (found_in := first_not_a_number(reference.series)) is not None:
        step, what = found_in
        verb = "are" if len(what) > 1 or what == ["the gradients"] else "is"
        reason = f"even on one device, {joined(what)} {verb} not a number in step {step}"
        return Row(planned, DIFFERS, (reason,), found.judgement)
    if found.judgement.equal:
        return Row(planned, EQUAL, _notes(found.judgement), found.judgement)
    # equal to one device with dense gradients: this difference is documented, and not a fault
    if found.dense is not None and found.dense.equal:
        documented = dense_embeddings(reference.facts.embeddings)
        return Row(planned, DOCUMENTED, (documented, *_notes(found.dense)), found.dense)
    return Row(planned, DIFFERS, causes(runner, planned, order, found), found.judgement)
