"""`distlaunch tune`: finds the fastest strategy and settings for a config on its hosts, within a budget of time."""

from __future__ import annotations

import dataclasses
import math
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distlaunch.base.compat import frameworks, untested
from distlaunch.base.errors import DistlaunchError, ExitCode, StopRequested, UsageError
from distlaunch.base.judge import Judgement, first_not_a_number
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import Record, TrialOrder
from distlaunch.cluster.hardware import Hardware
from distlaunch.cluster.machine import Machine
from distlaunch.config.run import RunConfig
from distlaunch.engines.context import SECONDARY_SRUN_TASK
from distlaunch.jobs.attempt import AttemptResult, checked, import_ahead
from distlaunch.jobs.choose_run import Choice, JobRequest, choose
from distlaunch.jobs.isolation import isolate_if_configured
from distlaunch.plan.train import REMOVED_ENV
from distlaunch.supervise.requests import SignalPipe
from distlaunch.tune import race
from distlaunch.tune.candidates import (
    UNTUNED,
    Candidate,
    Change,
    NotTried,
    in_turns,
    label_of,
    settings,
    strategies,
    untuned,
)
from distlaunch.tune.contestant import Contestant, ContestantFailed
from distlaunch.tune.contexts import Contexts
from distlaunch.tune.equality import judge_candidate, known_causes
from distlaunch.tune.race import Entry, Race, Spread
from distlaunch.tune.site import Site
from distlaunch.verify.comparison import failure_text
from distlaunch.verify.run_trials import Ended, TrialRunner
from distlaunch.verify.trials import trial_config

RECORDED_STEPS = 10
"""Steps that are compared with the untuned config, one by one."""
_FEWEST_STARTS, _MOST_STARTS, _CORES_PER_START = 2, 8, 4
"""Limits on the number of candidates that start at the same time. More would only wait for each other."""
_STRATEGIES, _BEST_STRATEGIES, _SETTINGS, _BEST_SETTINGS, _COMBINATIONS, _FINALS = 0.33, 0.42, 0.78, 0.82, 0.87, 0.91
"""Each part of the search ends at one of these fractions of the time that is left once the untuned config is ready. The
last rounds take the rest."""
_BEST = 2
"""Strategies whose settings are tried."""
_FINALISTS = 3
_FINAL_ROUNDS, _FEWEST_ROUNDS = 30, 3
_ROUNDS_IN_BUDGET, _SHORTEST_ROUND_S, _LONGEST_ROUND_S = 150, 0.15, 1.0
_HELPS = 0.98
"""A setting is combined with others if it reduces the duration of a step to this fraction or less."""
_MEMORY_SPARE = 1.5
"""Memory that must be free to start another candidate, as a factor of the largest one so far."""
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""With `false`, JAX does not reserve most of a GPU's memory, which the other candidates need."""
_START_LIMIT_S, _START_LIMIT = 60.0, 3
"""Limits on the start of a candidate, in seconds and as a factor of the longest start so far."""
_POLL_S = 0.01


@dataclass(frozen=True)
class TuneRequest:
    """A request to tune a config.

    Attributes:
        seconds: the budget of time.
        allows_16_bit: whether 16-bit precision may win, although its numbers differ.
        only: texts; the name of a candidate must contain at least one of them. Empty for all candidates.
    """

    target: str
    overrides: tuple[str, ...] = ()
    seconds: float = 60.0
    allows_16_bit: bool = False
    only: Sequence[str] = ()


@dataclass
class Row:
    """A candidate that was started.

    Attributes:
        failed: why it has failed; empty if it has not.
        dropped: whether it was dropped before the last rounds, because it was slower or has other losses.
        rounds: the duration of a step in each round, in seconds.
        judgement: the comparison with the untuned config; None if it was not compared.
        causes: why its losses differ, as far as that is known.
    """

    candidate: Candidate
    failed: str = ""
    dropped: bool = False
    rounds: list[float] = field(default_factory=list[float])
    judgement: Judgement | None = None
    memory_bytes: int = 0
    causes: list[str] = field(default_factory=list[str])

    @property
    def spread(self) -> Spread | None:
        return Spread.of(self.rounds) if self.rounds else None

    @property
    def is_equal(self) -> bool:
        return self.judgement is not None and self.judgement.equal


@dataclass
class TuneResult:
    """The result of all measurements.

    Attributes:
        label: the strategy of the untuned config.
        rows: the candidates that were started, the untuned config first.
        winner: the winner, which is the untuned config if nothing is proven to be faster; None if nothing was measured.
        batch: the mean number of examples in a step.
        failed: the result of the reference or the untuned config if it has failed.
        hosts: the names of the hosts on which candidates were measured; empty for this machine.
        interrupted: the exit code if the search has ended early.
        ended_early: why the search has ended early; empty if it has not, or if the user has interrupted the command.
        not_a_number: which values of the untuned config are not numbers, so that nothing can be compared.
    """

    label: str = ""
    rows: list[Row] = field(default_factory=list[Row])
    not_tried: list[NotTried] = field(default_factory=list[NotTried])
    winner: Row | None = None
    batch: float = 0.0
    seconds: float = 0.0
    failed: AttemptResult | None = None
    hosts: Sequence[str] = ()
    interrupted: int | None = None
    ended_early: str = ""
    not_a_number: str = ""

    @property
    def untuned(self) -> Row | None:
        return next((row for row in self.rows if row.candidate.label == UNTUNED and not row.candidate.changes), None)

    @property
    def exit_code(self) -> int:
        if self.interrupted is not None:
            return self.interrupted
        return ExitCode.DONE if self.failed is None else self.failed.outcome.exit_code


def tune(request: TuneRequest, machine: Machine, note: Callable[[str], None]) -> tuple[TuneResult, Choice] | None:
    """Measure candidates until the budget is spent, and choose the fastest.

    Args:
        note: called with messages about the progress.

    Returns:
        The result and the config; None if `srun` has started this command several times and another copy does the work.

    Raises:
        ConfigError: the config is wrong, even if this shows only when it is trained.
        UsageError: the request cannot be fulfilled.
    """
    began = time.monotonic()
    machine = machine.without_variables(REMOVED_ENV)
    if _PREALLOCATE not in machine.environ:  # without effect if no host has GPUs
        machine = machine.with_variables({_PREALLOCATE: "false"})
    if Path(request.target).is_dir():
        raise UsageError(f"{request.target} is a directory; expected a config file")
    choice = choose(JobRequest(request.target, (*request.overrides, "resume=never"), makes_run_dir=False), machine)
    if choice.context.is_secondary_srun_task:
        note(SECONDARY_SRUN_TASK)
        return None
    _check(choice.config)
    isolate_if_configured(choice.config, choice.context)
    for warning in untested(frameworks(choice.config.strategy.backend)):
        note(f"warning: {warning}")
    result = TuneResult()
    with (
        tempfile.TemporaryDirectory(prefix="distlaunch-tune-") as folder,
        SignalPipe() as signals,
        Contexts(choice.context) as contexts,
        _Tuning(request, choice, contexts, Path(folder), signals, result, note, began) as tuning,
    ):
        try:
            tuning.run()
        except StopRequested as asked:
            result.interrupted = 128 + asked.number
        except Ended as ended:
            result.failed, result.interrupted = ended.result, ended.code
        finally:
            tuning.conclude()
    result.seconds = time.monotonic() - began
    return result, choice


def _check(config: RunConfig) -> None:
    """Raise UsageError if the config cannot be tuned."""
    if config.data.sharding == "function":
        message = "data.sharding: got 'function': each worker trains on its own examples, so that another number of "
        raise UsageError(f"{message}workers would train on other data. Use 'rows' to tune the model")
    if config.strategy.is_asynchronous(config.cluster):
        message = f"strategy.kind: got '{config.strategy.kind}' with several workers, which update the variables "
        raise UsageError(
            f"{message}asynchronously: no two runs have the same losses, so nothing can be compared. "
            "Use another strategy, or one worker"
        )


class _Tuning:
    """The state of a running `tune`; a context manager that ends all candidates."""

    def __init__(
        self, request: TuneRequest, choice: Choice, contexts: Contexts, folder: Path, signals: SignalPipe,
        result: TuneResult, note: Callable[[str], None], began: float,
    ) -> None:  # fmt: skip
        self._request, self._choice, self._contexts, self._folder = request, choice, contexts, folder
        self._signals, self._result, self._note, self._began = signals, result, note, began
        self._site = Site(Hardware())
        self._round_s = min(_LONGEST_ROUND_S, max(_SHORTEST_ROUND_S, request.seconds / _ROUNDS_IN_BUDGET))
        self._running: dict[str, Contestant] = {}
        self._stopping: list[Contestant] = []
        self._rows: dict[str, Row] = {}
        self._starts_at_once = _FEWEST_STARTS
        self._largest_bytes = self._num_noted = 0
        self._start_s: list[float] = []
        self._searching_from = began
        self._reference: Record | None = None
        self._reference_run: RunDir | None = None
        self._untuned: Record | None = None
        self._race = Race(self._measure, self._drop, self._differs, time.monotonic, (UNTUNED,))

    def __enter__(self) -> _Tuning:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping += self._running.values()
        for contestant in self._stopping:
            contestant.ask_to_stop()
        for contestant in self._stopping:
            contestant.close()

    def run(self) -> None:
        config, context = self._choice.config, self._contexts.take({})
        with self._signals.raising():  # connections to hosts may take long
            site = self._site = Site.of(config, context)
        counted = config.with_workers(site.num_workers)
        _check(counted)
        self._result.label, self._result.hosts = label_of(counted, site.num_gpus_for(counted)), site.hosts
        self._starts_at_once = max(_FEWEST_STARTS, min(_MOST_STARTS, site.hardware.num_cores // _CORES_PER_START))
        for text in site.notes:
            self._note(f"warning: {text}")
        where = f" on {site.hosts[0]}" if site.hosts else ""
        self._note(f"one device{where}, {RECORDED_STEPS} steps: the reference and its rounding noise")
        if not site.hosts:
            self._import_ahead(each for each in strategies(config, site) if isinstance(each, Candidate))
            # the first setting that needs a process of its own
            own = untuned(counted)
            self._import_ahead(
                [each for each in settings(own, site) if isinstance(each, Candidate) and each.environ][:1]
            )
        order = TrialOrder(RECORDED_STEPS)
        runner = TrialRunner(
            dataclasses.replace(self._choice, context=context), order, self._folder, self._signals,
            reference_config(config),
        )  # fmt: skip
        self._contexts.give_back(context, {})
        self._reference, self._reference_run = runner.reference, runner.reference_run
        self._result.batch = sum(self._reference.rows) / len(self._reference.rows)
        if (found := first_not_a_number(self._reference.series)) is not None:
            self._result.not_a_number = f"in step {found[0]}: {', '.join(found[1])}"

        self._start([untuned(config)], math.inf)
        self._searching_from = time.monotonic()
        self._start(self._wanted(strategies(config, site)), self._time_of(_STRATEGIES))
        self._race.halve(_BEST, self._time_of(_BEST_STRATEGIES))
        if not all(self._race.rounds[name] for name in self._race.running):
            self._race.run(1, self._time_of(_BEST_STRATEGIES))  # there were too few to drop any
        # the untuned config may be among the best strategies
        ranked = self._race.ranking() or self._race.running  # nothing is measured if the untuned config is alone
        best = [self._rows[name].candidate for name in ranked if not self._differs(name)][:_BEST]
        for name in [each for each in self._race.running if self._differs(each)]:
            self._race.leave(name)  # it cannot win, and its rounds would take time from the others
        self._start(self._wanted(self._settings_of(best)), self._time_of(_SETTINGS))
        self._race.run(_FEWEST_ROUNDS, self._time_of(_BEST_SETTINGS))
        self._start(self._wanted(self._combinations(best)), self._time_of(_COMBINATIONS))
        self._race.halve(_FINALISTS, self._time_of(_FINALS))
        self._race.run(_FINAL_ROUNDS, self._time_of(1.0), at_least=2)

    def _note_rounds(self) -> None:
        """Report that candidates take turns, if their number has changed."""
        number = len(self._race.running)
        if number > 1 and number != self._num_noted:
            self._note(f"{number} candidates taking turns")
            self._num_noted = number

    def _import_ahead(self, candidates: Iterable[Candidate]) -> None:
        """Let processes of other backends or with other variables import while the reference is trained."""
        for candidate in {each.config.strategy.backend: each for each in candidates if self._is_named(each)}.values():
            context = self._contexts.take(candidate.environ)
            import_ahead(candidate.trial_config, RunDir(self._folder), "verify", context)

    def _is_named(self, candidate: Candidate) -> bool:
        return not self._request.only or any(text in candidate.name for text in self._request.only)

    def _time_of(self, fraction: float) -> float:
        """Return the time at which a part of the search ends."""
        end = self._began + self._request.seconds
        return end - (1 - fraction) * max(0.0, end - self._searching_from)

    def _wanted(self, found: Iterable[Candidate | NotTried]) -> list[Candidate]:
        wanted: list[Candidate] = []
        for each in found:
            if isinstance(each, NotTried):
                self._result.not_tried.append(each)
            elif not self._is_named(each):
                self._result.not_tried.append(NotTried(each.name, "not named by --only"))
            else:
                wanted.append(each)
        return wanted

    def _settings_of(self, best: Sequence[Candidate]) -> list[Candidate | NotTried]:
        """Return the best strategies with changed settings, in the order in which to try them."""
        assert self._reference is not None, "the reference is trained first"
        convolves = bool(self._reference.facts.convolutions)
        lists = [list(settings(candidate, self._site, convolves=convolves)) for candidate in best]
        spreads = [self._rows[candidate.name].spread for candidate in best]
        return in_turns(lists, [spread.median for spread in spreads if spread is not None])

    def _combinations(self, best: Sequence[Candidate]) -> list[Candidate]:
        """Return, for each of the best strategies, a candidate with all settings that have helped one by one."""
        found: list[Candidate] = []
        for candidate in best:
            base = self._rows[candidate.name].spread
            if base is None:
                continue
            helping: list[Change] = []
            for row in self._rows.values():
                changes = row.candidate.changes
                if row.candidate.label != candidate.label or len(changes) != 1 or row.spread is None:
                    continue
                may_help = row.is_equal and not row.candidate.is_16_bit
                # of two values of the same setting, the first one is taken
                taken = {name for change in helping for name in (*change.keys, *change.environ)}
                is_new = not taken & {*changes[0].keys, *changes[0].environ}
                if may_help and is_new and row.spread.median <= _HELPS * base.median:
                    helping.append(changes[0])
            if len(helping) > 1:
                found.append(candidate.with_change(*helping))
        return found

    def _start(self, candidates: Sequence[Candidate], until: float) -> None:
        """Start candidates, a few at the same time, until the time is over; add those that are ready to the race."""
        waiting, starting = list(candidates), dict[str, float]()
        while waiting or starting:
            while waiting and len(starting) < self._starts_at_once:
                candidate = waiting.pop(0)
                reason = self._why_not(until)
                if reason:
                    self._result.not_tried += [NotTried(each.name, reason) for each in (candidate, *waiting)]
                    waiting.clear()
                    break
                self._note(f"starting {candidate.name}")
                self._begin(candidate)
                starting[candidate.name] = time.monotonic()
            ready: list[str] = []
            for name in list(starting):
                try:
                    if name in self._running and not self._running[name].is_ready():
                        self._check_start(name, starting[name])
                        continue
                    ready.append(name)
                except ContestantFailed as failed:
                    self._fail(name, failed)
                self._start_s.append(time.monotonic() - starting.pop(name))
            # numbers are checked while others start; only measurements need a quiet machine
            for name in ready:
                self._prepare(name)
            if starting and not ready:
                self._poll()
                time.sleep(_POLL_S)

    def _check_start(self, name: str, began: float) -> None:
        """Raise ContestantFailed if a candidate should have started by now.

        A start may take what was left of the budget when it began, or much longer than the others if that is more.
        """
        limit_s = max(_START_LIMIT_S, self._time_of(1.0) - began, _START_LIMIT * max(self._start_s, default=0.0))
        if name != UNTUNED and time.monotonic() > began + limit_s:
            self._running[name].ask_to_stop()
            raise ContestantFailed(DistlaunchError(f"its first steps were not done after {limit_s:,.0f} s"))

    def _why_not(self, until: float) -> str:
        """Return why no more candidates are started, or an empty string."""
        import psutil  # imported here, since it takes 20 ms

        if len(self._rows) < 2:
            return ""  # without a second candidate, there is nothing to compare
        expected_s = sum(self._start_s) / len(self._start_s) if self._start_s else 0.0
        if time.monotonic() + expected_s > until:
            return f"no time is left in the budget of {self._request.seconds:g} s"
        reports = [report for contestant in self._running.values() for report in contestant.memory()]
        available = [report.available_bytes for report in reports]
        if not self._site.hosts:
            available = [psutil.virtual_memory().available]
        if min(available, default=0) < _MEMORY_SPARE * self._largest_bytes:
            return "too little memory beside the other candidates"
        return ""

    def _begin(self, candidate: Candidate) -> None:
        assert self._reference_run is not None, "the reference is trained first"
        row = self._rows[candidate.name] = Row(candidate)
        self._result.rows.append(row)
        self._close_ended()
        run = Contestant.run_dir(self._reference_run)
        context = self._contexts.take(candidate.environ)
        contestant = Contestant(candidate, run, context, RECORDED_STEPS, self._round_s, self._poll)
        self._running[candidate.name] = contestant
        contestant.start()

    def _close_ended(self) -> None:
        """Close the dropped candidates whose tasks have ended, and let others use their hosts."""
        for contestant in [each for each in self._stopping if each.has_ended]:
            self._stopping.remove(contestant)
            contestant.close()
            # after a failure, hosts may be missing, and an engine would go on without them
            if not self._rows[contestant.candidate.name].failed:
                self._contexts.give_back(contestant.context, contestant.candidate.environ)

    def _prepare(self, name: str) -> None:
        row, contestant = self._rows[name], self._running[name]
        try:
            contestant.prepare(self._time_of(1.0) - time.monotonic())
            record = contestant.record()
        except ContestantFailed as failed:
            self._fail(name, failed)
            return
        if self._untuned is None:
            self._untuned = record
        assert self._reference is not None, "the reference is trained first"
        row.judgement = judge_candidate(record, self._untuned, self._reference)
        if name == UNTUNED:
            # its losses are the expected ones, even if they are not those of one device
            row.judgement = dataclasses.replace(
                row.judgement, first_step=None, gradients_differ=False, weights_differ=False, losses=(), metrics=()
            )
        if self._differs(name):
            has_sparse = self._reference.dense is not None
            facts, own = self._reference.facts, self._choice.config
            row.causes = known_causes(row.candidate.config, own, facts, has_sparse_gradients=has_sparse)
        self._note_memory(name)
        self._race.enter(name)
        row.rounds = self._race.rounds[name]

    def _note_memory(self, name: str) -> None:
        reports = self._running[name].memory()
        self._rows[name].memory_bytes = sum(report.resident_bytes for report in reports)
        by_host = Counter[str]()
        for report in reports:
            by_host[report.host] += report.resident_bytes
        self._largest_bytes = max(self._largest_bytes, *by_host.values(), 0)

    def _fail(self, name: str, failed: ContestantFailed) -> None:
        """Record that a candidate has failed.

        Raises:
            ConfigError: it is the untuned config, and the config is wrong.
            Ended: it is the untuned config, with which all others are compared.
        """
        self._stopping.append(self._running.pop(name))
        found = failed.result
        if isinstance(found, BaseException) and not isinstance(found, DistlaunchError):
            raise found
        text = " ".join((str(found) if isinstance(found, BaseException) else failure_text(found)).split())
        if name == UNTUNED and not self._rows[name].rounds:
            if isinstance(found, BaseException):
                raise found
            checked(found, self._choice.locate)
            raise Ended(found, None)
        if name == UNTUNED:
            code = ExitCode.FAILED if isinstance(found, BaseException) else found.outcome.exit_code
            self._result.ended_early = text
            raise Ended(None, code)
        self._rows[name].failed = text
        self._note(f"{name}: failed")

    def _measure(self, name: str) -> float | None:
        self._poll()
        self._note_rounds()
        try:
            duration = self._running[name].measure()
        except ContestantFailed as failed:
            self._fail(name, failed)
            return None
        self._note_memory(name)
        return duration

    def _drop(self, name: str, num_rounds: int) -> None:
        self._rows[name].dropped = True
        contestant = self._running.pop(name)
        contestant.ask_to_stop()
        self._stopping.append(contestant)

    def _differs(self, name: str) -> bool:
        row = self._rows[name]
        return not row.is_equal and not row.candidate.is_16_bit

    def _poll(self) -> None:
        """Raise Ended if the user asks this command to stop."""
        asked = [number for number in self._signals.read() if number != signal.SIGCHLD]
        if asked:
            raise Ended(None, 128 + (signal.SIGINT if signal.SIGINT in asked else asked[0]))

    def conclude(self) -> None:
        """Choose the winner among the candidates that were measured."""
        for row in self._result.rows:
            if row.spread is None and not row.failed:
                self._result.not_tried.append(NotTried(row.candidate.name, "the search was interrupted"))
        own = self._result.untuned
        if own is None or own.spread is None:
            return
        entries = [
            Entry(row.candidate.name, row.spread, self._may_win(row), row.candidate.num_changes)
            for row in self._result.rows
            if row.spread is not None and not row.failed and row is not own
        ]
        untuned_entry = Entry(own.candidate.name, own.spread, may_win=True, num_changes=0)
        self._result.winner = self._rows[race.choose(entries, untuned_entry).name]

    def _may_win(self, row: Row) -> bool:
        if self._result.not_a_number or len(row.rounds) < _FEWEST_ROUNDS:
            return False
        return self._request.allows_16_bit if row.candidate.is_16_bit else row.is_equal


def reference_config(config: RunConfig) -> RunConfig:
    """Return the config on one device, in the precision of the config."""
    found = trial_config(config, {"kind": "one_device"}, {})
    return found.model_copy(update={"precision": config.precision})
