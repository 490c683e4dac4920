"""`distlaunch tune`: finds the fastest strategy and settings for a config on its hosts, within a budget of time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

from distlaunch.base.compat import frameworks, untested
from distlaunch.base.errors import DistlaunchError, ExitCode, StopRequested, UsageError
from distlaunch.base.judge import Judgement, first_not_a_number
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.trial_records import Record
from distlaunch.cluster.cgroup import available_memory
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
    NotTried,
    label_of,
    settings,
    strategies,
    untuned,
)
from distlaunch.tune.contestant import Contestant, Reference, TrialFailed
from distlaunch.tune.contexts import Contexts
from distlaunch.tune.equality import judge_candidate, known_causes
from distlaunch.tune.lanes import Lane, Starts
from distlaunch.tune.race import Entry, Race, Spread
from distlaunch.tune.site import Site
from distlaunch.verify.comparison import failure_text
from distlaunch.verify.run_trials import Ended

RECORDED_STEPS = 10
"""Steps that are compared with the untuned config, one by one."""
_FEWEST_STARTS, _MOST_STARTS, _CORES_PER_START = 2, 8, 4
"""Limits on the number of candidates that start at the same time. More would only wait for each other."""
_STRATEGIES, _FIRST_SETTINGS, _BEST_OF_FIRST = 0.4, 0.55, 0.62
_SETTINGS, _BEST_SETTINGS, _COMBINATIONS, _FINALS = 0.92, 0.93, 0.94, 0.95
"""Each part of the search ends at one of these fractions of the time that is left once the untuned config is ready. The
last rounds take the rest."""
_BEST = 2
"""Strategies whose settings are tried."""
_AHEAD = 1.25
"""Ratio of step times from which settings are tried on another strategy than that of the config right away. These times
are not measured in turns."""
_MOST_GAIN = 1.5
"""Largest factor by which a setting is expected to make a strategy faster."""
_FINALISTS = 3
_FINAL_ROUNDS, _FEWEST_ROUNDS = 30, 3
_ROUNDS_IN_BUDGET, _SHORTEST_ROUND_S, _LONGEST_ROUND_S = 150, 0.15, 1.0
_HELPS = 0.98
"""A setting is combined with others if it reduces the duration of a step to this fraction or less."""
_MEMORY_SPARE = 1.5
"""Memory that must be free for each task that starts, as a factor of the largest task so far."""
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""With `false`, JAX does not reserve most of a GPU's memory, which the other candidates need."""
_START_LIMIT_S, _START_LIMIT = 60.0, 3
"""Limits on the start of the only candidate beside the untuned config, in seconds and as a factor of the longest start
so far. Other starts end with the budget."""
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
        ratios: the same durations, divided by that of the untuned config in the same round.
        judgement: the comparison with the untuned config; None if it was not compared.
        causes: why its losses differ, as far as that is known.
    """

    candidate: Candidate
    failed: str = ""
    dropped: bool = False
    rounds: list[float] = field(default_factory=list[float])
    ratios: list[float] = field(default_factory=list[float])
    judgement: Judgement | None = None
    memory_bytes: int = 0
    causes: list[str] = field(default_factory=list[str])

    @property
    def spread(self) -> Spread | None:
        return Spread.of(self.rounds) if self.rounds else None

    @property
    def ratio(self) -> float | None:
        """The duration of a step as a ratio to that of the untuned config; None if nothing was measured."""
        return statistics.median(self.ratios) if self.ratios else None

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
        allows_16_bit: see `TuneRequest`.
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
    allows_16_bit: bool = False

    def may_win(self, row: Row) -> bool:
        """Return True if the numbers of a candidate allow it to win."""
        return self.allows_16_bit if row.candidate.is_16_bit else row.is_equal

    def entry(self, row: Row) -> Entry | None:
        """Return a candidate's entry in the choice of the winner; None if it was not measured or has failed."""
        if row.spread is None or row.failed:
            return None
        may_win = not self.not_a_number and len(row.rounds) >= _FEWEST_ROUNDS and self.may_win(row)
        spreads = row.spread, Spread.of(row.ratios)
        return Entry(row.candidate.name, *spreads, may_win, row.candidate.num_changes, row.dropped)

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
    result = TuneResult(allows_16_bit=request.allows_16_bit)
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
        self._not_tried: dict[str, str] = {}
        """The reason for each candidate that has not been started."""
        self._offered = set[Hashable]()
        self._starts_at_once = _FEWEST_STARTS
        self._largest_task_bytes = self._num_noted = 0
        self._start_s = defaultdict[str, list[float]](list)
        """Durations of the starts of each strategy."""
        self._searching_from = began
        self._trained: Reference | None = None
        self._reference: Record | None = None
        self._untuned: Record | None = None
        self._race = Race(self._measure, self._drop, self._differs, time.monotonic, UNTUNED)

    def __enter__(self) -> _Tuning:
        return self

    def __exit__(self, *error: object) -> None:
        reference = [] if self._trained is None else [self._trained]
        trials = [*reference, *self._stopping, *self._running.values()]
        for trial in trials:
            trial.ask_to_stop()
        for trial in trials:
            trial.close()

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
        run = RunDir.claim(self._folder, "verify")
        self._trained = Reference(config, run, context, RECORDED_STEPS)
        self._trained.start()
        while not self._trained.has_checkpoints():
            self._wait()
        if self._trained.has_ended:
            self._finished_reference()
        self._contexts.give_back(context, {})  # only engines of other hosts are not shared, and there it has ended

        own = untuned(config)
        self._start(Lane.of([own], math.inf))
        self._searching_from = time.monotonic()
        self._start(
            Lane.of(self._wanted(strategies(config, site)), self._time_of(_STRATEGIES)),
            Lane(lambda: self._next_setting(own), self._time_of(_FIRST_SETTINGS)),
        )
        self._race.halve(_FINALISTS, self._time_of(_BEST_OF_FIRST))
        if not all(self._race.rounds[name] for name in self._race.running):
            self._race.run(1, self._time_of(_BEST_OF_FIRST))  # there were too few to drop any
        best = self._best_candidates()
        for name in [each for each in self._race.running if self._differs(each)]:
            self._race.leave(name)  # it cannot win, and its rounds would take time from the others
        self._start(*self._lanes_of(best, self._time_of(_SETTINGS)))
        self._race.run(_FEWEST_ROUNDS, self._time_of(_BEST_SETTINGS))
        self._start(Lane.of(self._combinations(self._best_candidates()), self._time_of(_COMBINATIONS)))
        self._race.halve(_FINALISTS, self._time_of(_FINALS))
        self._race.run(_FINAL_ROUNDS, self._time_of(1.0), at_least=_FEWEST_ROUNDS)

    def _finished_reference(self) -> Record:
        """Return the record of the reference, after its end.

        Raises:
            ConfigError: the config is wrong.
            Ended: the reference has failed.
        """
        assert self._trained is not None, "it has been started"
        if self._reference is not None:
            return self._reference
        try:
            while (found := self._trained.record()) is None:
                self._wait()
        except TrialFailed as failed:
            self._end(failed.result)
        self._reference = found
        self._result.batch = sum(found.rows) / len(found.rows)
        if (first := first_not_a_number(found.series)) is not None:
            self._result.not_a_number = f"in step {first[0]}: {', '.join(first[1])}"
        return found

    def _end(self, found: AttemptResult | BaseException) -> Never:
        """Raise the error, or the end, of a trial without which nothing can be compared."""
        if isinstance(found, BaseException):
            raise found
        checked(found, self._choice.locate)  # raises errors in the config, with their lines
        raise Ended(found, None)

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
        """Return the candidates that may be started, and note the others with their reasons."""
        wanted: list[Candidate] = []
        started = {row.candidate.identity for row in self._rows.values()}
        for each in found:
            if isinstance(each, NotTried):
                self._not_tried[each.name] = each.reason
            elif each.identity in started:
                continue
            elif not self._is_named(each):
                self._not_tried[each.name] = "not named by --only"
            else:
                wanted.append(each)
        return wanted

    def _settings_of(self, candidate: Candidate) -> list[Candidate]:
        """Return a strategy with each setting that has not been tried yet, in the order in which to try them."""
        return self._wanted(settings(candidate, self._site, self._finished_reference().facts))

    def _next_setting(self, own: Candidate) -> Candidate | None:
        """Return a further setting for the config; for another candidate, if that is much faster so far."""
        may_win = [name for name in self._race.running if self._result.may_win(self._rows[name])]
        fastest = min(may_win, key=lambda name: self._running[name].step_s, default=UNTUNED)
        is_ahead = self._running[fastest].step_s * _AHEAD < self._running[UNTUNED].step_s
        found = self._settings_of(self._rows[fastest].candidate if is_ahead else own)
        setting = next((each for each in found if each.identity not in self._offered), None)
        if setting is not None:
            self._offered.add(setting.identity)
        return setting

    def _best_candidates(self) -> list[Candidate]:
        """Return the fastest candidates of the fastest strategies that may win."""
        # nothing is measured if the untuned config is alone
        ranked = [self._rows[name] for name in self._race.ranking() or self._race.running]
        best: dict[str, Candidate] = {}
        for row in ranked:
            if self._result.may_win(row):
                best.setdefault(row.candidate.label, row.candidate)
        return list(best.values())[:_BEST]

    def _lanes_of(self, best: Sequence[Candidate], until: float) -> list[Lane]:
        """Return lanes with combinations of the settings that have helped so far, and with further settings.

        Args:
            best: the fastest candidates of two strategies. If the second is so far behind that a setting would hardly
                make up for it, its settings have no lane of their own.
        """
        lists = [self._settings_of(candidate) for candidate in best]
        found_ratios = [self._rows[candidate.name].ratio for candidate in best]
        ratios = [ratio for ratio in found_ratios if ratio is not None]
        if len(ratios) > 1 and ratios[1] > _MOST_GAIN * ratios[0]:
            lists = [list(itertools.chain.from_iterable(lists))]
        combined = self._combinations(best)
        known = {each.identity for each in combined}
        lists = [[each for each in found if each.identity not in known] for found in lists]
        return [Lane.of(found, until) for found in (combined, *lists)]

    def _combinations(self, best: Sequence[Candidate]) -> list[Candidate]:
        """Return the best candidates, each with all other settings that have helped its strategy."""
        found: list[Candidate] = []
        for candidate in best:
            combined, taken = candidate, candidate.changed_names
            for row in self._rows.values():
                if row.candidate.label != candidate.label or not row.candidate.changes or not self._result.may_win(row):
                    continue
                change, parent = row.candidate.changes[-1], self._rows.get(row.candidate.parent.name)
                if parent is None or parent.ratio is None or row.ratio is None or change.names & taken:
                    continue
                # of two values of the same setting, the first one is taken
                if row.ratio <= _HELPS * parent.ratio:
                    combined, taken = combined.with_change(change), taken | change.names
            found.append(combined)
        return self._wanted(found)

    def _start(self, *lanes: Lane) -> None:
        """Start the candidates of lanes, a few at the same time; those that are ready race."""
        starts = Starts(lanes, self._starts_at_once)
        while True:
            while candidate := starts.take(time.monotonic(), self._why_not):
                self._note(f"starting {candidate.name}")
                self._begin(candidate)
            self._not_tried |= starts.left_out
            if not starts.starting:
                return
            while not self._end_starts(starts):  # before, the lanes have no other candidates
                self._wait()

    def _end_starts(self, starts: Starts) -> bool:
        """Let the candidates race that are prepared; return True if a start has ended."""
        ended = False
        # numbers are checked while others start; only measurements need a quiet machine
        for name, began in starts.starting.items():
            try:
                is_prepared = self._running[name].is_prepared()
                if not is_prepared and self._is_too_late(name, began):
                    self._give_up(name)
                elif not is_prepared:
                    continue
            except TrialFailed as failed:
                self._fail(name, failed)
            ended = True
            self._start_s[self._rows[name].candidate.label].append(starts.end(name, time.monotonic()))
            if name in self._running:
                self._enter(name)
        return ended

    def _is_too_late(self, name: str, began: float) -> bool:
        """Return True if a start goes beyond the budget.

        Raises:
            TrialFailed: nothing else was measured yet, and the candidate takes much longer than the others.
        """
        if name == UNTUNED:
            return False
        now, end = time.monotonic(), self._time_of(1.0)
        if len(self._race.rounds) > 1:  # there is a candidate to compare with the untuned config
            return now > end
        longest_s = max(itertools.chain(*self._start_s.values()), default=0.0)
        limit_s = max(_START_LIMIT_S, end - began, _START_LIMIT * longest_s)
        if now > began + limit_s:
            self._running[name].ask_to_stop()
            raise TrialFailed(DistlaunchError(f"it was not ready after {limit_s:,.0f} s"))
        return False

    def _give_up(self, name: str) -> None:
        """End a candidate that was not ready in time; it counts as one that was not tried."""
        self._not_tried[name] = f"it was still starting after the budget of {self._request.seconds:g} s"
        self._drop(name, 0)

    def _why_not(self, candidate: Candidate, lane: Lane) -> str:
        """Return why a candidate is not started, or an empty string."""
        if len(self._rows) < 2:
            return ""  # without a second candidate, there is nothing to compare
        durations = self._start_s[candidate.label] or lane.durations or self._start_s[UNTUNED]
        if time.monotonic() + statistics.fmean(durations) > lane.until:
            return f"no time is left in the budget of {self._request.seconds:g} s"
        reports = [report for contestant in self._running.values() for report in contestant.memory()]
        available = [report.available_bytes for report in reports]
        if not self._site.hosts:
            available = [available_memory()]
        # those that are starting have not taken their memory yet
        starting = [self._rows[name].candidate for name in self._running if name not in self._race.rounds]
        tasks = sum(self._site.workers_per_host(each.counted_config(self._site)) for each in [candidate, *starting])
        if min(available, default=0) < _MEMORY_SPARE * tasks * self._largest_task_bytes:
            return "too little memory beside the other candidates"
        return ""

    def _begin(self, candidate: Candidate) -> None:
        assert self._trained is not None, "the reference is trained first"
        row = self._rows[candidate.name] = Row(candidate)
        self._not_tried.pop(candidate.name, None)  # there may have been no time left in an earlier part of the search
        self._result.rows.append(row)
        self._close_ended()
        run = Contestant.run_dir(self._trained.run, RECORDED_STEPS)
        context = self._contexts.take(candidate.environ)
        cores = self._site.hardware.num_cores
        contestant = Contestant(candidate, run, context, RECORDED_STEPS, self._round_s, cores, self._poll)
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

    def _enter(self, name: str) -> None:
        """Compare the numbers of a candidate, and let it take part in the race."""
        row = self._rows[name]
        try:
            record = self._running[name].record()
        except TrialFailed as failed:
            self._fail(name, failed)
            return
        if self._untuned is None:
            self._untuned = record
        reference = self._finished_reference()
        row.judgement = judge_candidate(record, self._untuned, reference)
        if name == UNTUNED:
            # its losses are the expected ones, even if they are not those of one device
            row.judgement = dataclasses.replace(
                row.judgement, first_step=None, gradients_differ=False, weights_differ=False, losses=(), metrics=()
            )
        if self._differs(name):
            has_sparse = reference.dense is not None
            facts, own = reference.facts, self._choice.config
            row.causes = known_causes(row.candidate.config, own, facts, has_sparse_gradients=has_sparse)
        self._note_memory(name)
        self._race.enter(name)
        row.rounds, row.ratios = self._race.rounds[name], self._race.ratios[name]

    def _note_memory(self, name: str) -> None:
        reports = self._running[name].memory()
        sizes = [report.resident_bytes for report in reports]
        self._rows[name].memory_bytes = sum(sizes)
        self._largest_task_bytes = max(self._largest_task_bytes, *sizes, 0)

    def _fail(self, name: str, failed: TrialFailed) -> None:
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
            self._end(found)
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
        except TrialFailed as failed:
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

    def _wait(self) -> None:
        self._poll()
        time.sleep(_POLL_S)

    def _poll(self) -> None:
        """Raise Ended if the user asks this command to stop."""
        asked = [number for number in self._signals.read() if number != signal.SIGCHLD]
        if asked:
            raise Ended(None, 128 + (signal.SIGINT if signal.SIGINT in asked else asked[0]))

    def conclude(self) -> None:
        """Choose the winner among the candidates that were measured."""
        for row in self._result.rows:
            if row.spread is None and not row.failed:
                self._not_tried.setdefault(row.candidate.name, "the search was interrupted")
        self._result.not_tried += [NotTried(name, reason) for name, reason in self._not_tried.items()]
        own = self._result.untuned
        if own is None or own.spread is None:
            return
        entries = [entry for row in self._result.rows if row is not own and (entry := self._result.entry(row))]
        untuned_entry = Entry(own.candidate.name, own.spread, Spread.of(own.ratios), may_win=True, num_changes=0)
        self._result.winner = self._rows[race.choose(entries, untuned_entry).name]
