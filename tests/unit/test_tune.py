"""The parts of `tune` that need no tasks: candidates, halving, the winner, the table, and the written file."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from distlaunch.base.call_length import steps_in_call
from distlaunch.base.errors import UsageError
from distlaunch.base.judge import Judgement
from distlaunch.base.run_dir import RunDir, checkpoint_name
from distlaunch.base.run_files.trial_records import ModelFacts, Record, RoundOrder, RoundResult, Series
from distlaunch.cli.main import cli
from distlaunch.cluster.hardware import ONEDNN, POOL_SIZES, Hardware
from distlaunch.config.read.load import load_config, load_mapping
from distlaunch.config.run import RunConfig
from distlaunch.tune.candidates import UNTUNED, Candidate, Change, NotTried, settings, strategies, untuned
from distlaunch.tune.contestant import Contestant
from distlaunch.tune.equality import judge_candidate, known_causes
from distlaunch.tune.lanes import Lane, Starts
from distlaunch.tune.race import Entry, Race, Spread, choose, steps_of_round
from distlaunch.tune.site import Site
from distlaunch.tune.tuning import Row, TuneResult
from distlaunch.tune.write import changed_text, write_winner
from distlaunch.ui.tune import as_json, table_lines

PLAIN = {
    "name": "mine",
    "model": {"function": "distlaunch.workloads.images:cnn"},
    "data": {"function": "distlaunch.workloads.images:fashion_mnist", "global_batch": 24},
    "compile": {"optimizer": "sgd", "loss": "mse"},
}
CPU = Hardware("linux", "x86_64", "some CPU", ("avx2",), logical_cores=4, usable_cores=(0, 1, 2, 3))


def config(**sections: object) -> RunConfig:
    return load_mapping(PLAIN | sections, (), {}).config


OWN_CONFIG = config()
NO_FACTS = ModelFacts()

# candidates


def here(cores: int, gpus: int, hardware: Hardware = CPU, workers: int = 1) -> Site:
    return Site(hardware._replace(usable_cores=range(cores)), (gpus,), num_workers=workers)


def tried(found: RunConfig, cores: int = 4, gpus: int = 0) -> list[str]:
    return [each.name for each in strategies(found, here(cores, gpus)) if isinstance(each, Candidate)]


def not_tried(found: RunConfig, cores: int = 4, gpus: int = 0) -> dict[str, str]:
    return {each.name: each.reason for each in strategies(found, here(cores, gpus)) if isinstance(each, NotTried)}


def test_strategies_fit_the_machine_and_leave_out_the_untuned_one() -> None:
    on_one = tried(config())
    assert on_one[0] == "jax, batch 1"
    assert "one_device" not in on_one
    assert {"mirrored, 2 replicas", "mirrored, 4 replicas", "jax, batch 4", "dtensor, batch 2"} <= {*on_one}
    assert not any("8" in name for name in on_one)
    mirrored = tried(config(strategy={"kind": "mirrored"}), cores=2)
    assert mirrored[0] == "one_device"
    assert "mirrored, 2 replicas" not in mirrored, "two CPU devices are the default"
    assert tried(config(), cores=1) == ["jax, batch 1"]
    assert "1 core" in not_tried(config(), cores=1)["several replicas or processes"]
    assert "parameter_server" in not_tried(config())


def test_a_strategy_that_does_not_fit_is_listed_with_the_reason() -> None:
    listed = not_tried(config(compile={"optimizer": "sgd", "loss": "mse", "jit_compile": True}))
    names = {name for name, reason in listed.items() if reason.startswith("does not fit: ") and "jit_compile" in reason}
    assert names == {"dtensor, batch 2", "dtensor, batch 4"}


def changes(
    found: RunConfig, hardware: Hardware = CPU, gpus: int = 0, facts: ModelFacts = NO_FACTS
) -> tuple[list[str], dict[str, str]]:
    """Return the names of the changes that are tried, and the reasons of the others."""
    all_of = list(settings(untuned(found), here(4, gpus, hardware), facts))
    names = [each.changes[-1].label for each in all_of if isinstance(each, Candidate)]
    return names, {each.name.removeprefix("untuned, "): each.reason for each in all_of if isinstance(each, NotTried)}


def test_settings_that_have_an_effect() -> None:
    names, reasons = changes(config())
    assert names == ["XLA", "1 thread", "2 threads", "oneDNN off", "steps_per_call 16", "steps_per_call 1",
                     "mixed_bfloat16 (16 bits)"]  # fmt: skip
    assert not reasons
    for facts in (ModelFacts(convolutions=["conv"]), ModelFacts(random=["dropout"])):
        names, _ = changes(config(), facts=facts)
        assert names[-2:] == ["XLA", "mixed_bfloat16 (16 bits)"], "XLA is slow on CPUs, or draws other random numbers"
    assert changes(config(), gpus=1, facts=ModelFacts(convolutions=["conv"]))[0][0] == "XLA"
    names, reasons = changes(config(strategy={"kind": "mirrored", "replicas": 2}))
    assert "XLA" not in names
    assert reasons["XLA"].startswith("no effect")
    names, reasons = changes(config(strategy={"kind": "jax", "mesh": {"batch": 1}}))
    assert {"XLA", "oneDNN"} <= reasons.keys()
    names, reasons = changes(config(strategy={"kind": "dtensor", "mesh": {"batch": 1}}))
    assert "XLA" in reasons
    names, reasons = changes(config(), gpus=1)
    assert {"oneDNN", "threads"} <= reasons.keys()


def test_settings_start_from_those_of_the_config_and_the_environment() -> None:
    own = config(compile={"optimizer": "sgd", "loss": "mse", "jit_compile": True}, precision="mixed_bfloat16",
                 train={"steps_per_call": 16})  # fmt: skip
    names, _ = changes(own, CPU._replace(environ={ONEDNN: "0", "OMP_NUM_THREADS": "2"}))
    assert names == ["steps_per_call auto", "steps_per_call 1", "no XLA", "oneDNN on"]
    names, reasons = changes(config(train={"callbacks": [{"name": "TerminateOnNaN"}]}))
    assert "callbacks" in reasons["steps per call"]


def test_threads_are_those_of_each_task() -> None:
    two = config(strategy={"kind": "multi_worker_mirrored"}, cluster={"workers": 2})
    found = [each for each in settings(untuned(two), here(4, 0, workers=2)) if isinstance(each, Candidate)]
    assert [each.environ for each in found if each.environ and ONEDNN not in each.environ] == [
        dict.fromkeys(POOL_SIZES, "1"), dict.fromkeys(POOL_SIZES, "4"),
    ]  # fmt: skip


def test_a_candidate_changes_only_its_own_keys() -> None:
    own = config(strategy={"kind": "multi_worker_mirrored"}, cluster={"workers": 3, "stop_timeout_s": 7}, seed=5)
    found = Candidate(own, "one_device", {"kind": "one_device"}, {}).with_change(
        Change("XLA", {("compile", "jit_compile"): True})
    )
    changed = found.config
    assert (changed.strategy.kind, changed.cluster.num_workers, changed.cluster.stop_timeout_s) == ("one_device", 1, 7)
    assert changed.compile is not None
    assert changed.compile.jit_compile is True
    assert (changed.seed, changed.data, changed.model, changed.train) == (5, own.data, own.model, own.train)
    assert found.keys == {
        ("strategy",): {"kind": "one_device"},
        ("cluster", "workers"): 1,
        ("compile", "jit_compile"): True,
    }
    assert untuned(own).config == own
    own = config(strategy={"kind": "multi_worker_mirrored"},
                 cluster={"workers": 3, "ports": [4001, 4002, 4003], "evaluator": True})  # fmt: skip
    for workers, ports in ((2, [4001, 4002]), (4, "auto"), (1, "auto")):
        kind = "multi_worker_mirrored" if workers > 1 else "one_device"
        cluster = Candidate(own, kind, {"kind": kind}, {"workers": workers}).config.cluster
        assert (cluster.workers, cluster.ports, cluster.evaluator) == (workers, ports, True)
    trial = untuned(config(precision="mixed_bfloat16")).trial_config
    assert (trial.precision, trial.validation, trial.cluster.stall_timeout_s) == ("mixed_bfloat16", None, None)


# starts


def simulate(lanes: Mapping[str, list[float]], until: float, at_once: int = 2) -> tuple[dict[str, list[str]], Starts]:
    """Start candidates that take given seconds, and return the names of those started in each lane."""
    seconds = {f"{lane}{number}": each for lane, all_of in lanes.items() for number, each in enumerate(all_of)}
    starts = Starts(
        [Lane.of([Candidate(OWN_CONFIG, name) for name in seconds if name[0] == lane], until) for lane in lanes],
        at_once,
    )
    now, found = 0.0, {lane: list[str]() for lane in lanes}

    def why_not(_: Candidate, lane: Lane) -> str:
        return "no time" if now + max(lane.durations, default=1.0) > lane.until else ""

    while True:
        while candidate := starts.take(now, why_not):
            found[candidate.name[0]].append(candidate.name)
        assert len(starts.starting) <= at_once
        if not starts.starting:
            return found, starts
        now, name = min((began + seconds[name], name) for name, began in starts.starting.items())
        starts.end(name, now)


def test_slow_starts_of_one_lane_take_no_time_from_the_other() -> None:
    found, starts = simulate({"a": [15.0] * 4, "b": [5.0] * 9}, until=30.0)
    assert found == {"a": ["a0", "a1"], "b": [f"b{number}" for number in range(6)]}
    assert starts.left_out == dict.fromkeys(["a2", "a3", "b6", "b7", "b8"], "no time")


def test_a_lane_whose_candidates_would_come_too_late_leaves_the_time_to_the_other() -> None:
    found, _ = simulate({"a": [20.0, 20.0], "b": [4.0] * 20}, until=30.0)
    assert found["a"] == ["a0"]
    assert len(found["b"]) == 9, "five beside the first start of the other lane, then in both places"
    alone, _ = simulate({"a": [5.0] * 4, "b": []}, until=12.0)
    assert alone["a"] == ["a0", "a1", "a2", "a3"]


def test_a_lane_may_have_candidates_later() -> None:
    waiting: list[Candidate] = []
    first = Candidate(OWN_CONFIG, "first")
    starts = Starts([Lane.of([first], 9.0), Lane(lambda: waiting.pop() if waiting else None, 9.0)], 2)
    assert starts.take(0.0, lambda *_: "") is first
    assert starts.take(0.0, lambda *_: "") is None
    waiting.append(Candidate(OWN_CONFIG, "later"))
    found = starts.take(0.0, lambda *_: "")
    assert found is not None
    assert found.name == "later"


# halving


class FakeMachine:
    """A clock and candidates, of which each round takes a second and returns given durations."""

    def __init__(self, durations: Mapping[str, float | list[float | None]], *, differing: tuple[str, ...] = ()) -> None:
        self.now, self.order, self.dropped = 0.0, list[str](), dict[str, int]()
        self._durations = dict(durations)
        self.race = Race(
            self.measure, self.dropped.__setitem__, lambda name: name in differing, lambda: self.now, UNTUNED
        )
        for name in durations:
            self.race.enter(name)

    def set(self, name: str, durations: list[float | None]) -> None:
        self._durations[name] = durations

    def measure(self, name: str) -> float | None:
        self.now += 1
        self.order.append(name)
        found = self._durations[name]
        return found[self.order.count(name) - 1] if isinstance(found, list) else found


@pytest.mark.parametrize("length", ["auto", 1, 16])
def test_a_trial_groups_steps_as_training_does(length: int | str) -> None:
    """Meshes compile their steps in another way if no call makes several."""
    own = config(strategy={"kind": "jax", "mesh": {"batch": 1}}, train={"steps_per_call": length})
    assert untuned(own).trial_config.train.steps_per_call == length


def test_candidates_take_turns_and_the_slower_half_is_dropped() -> None:
    machine = FakeMachine({UNTUNED: 9.0, "a": 1.4, "b": 1.3, "c": 1.2, "d": 1.1, "e": 1.5})
    machine.race.halve(1, until=1e9)
    assert machine.order[:6] == machine.order[6:12] == [UNTUNED, "a", "b", "c", "d", "e"]
    assert machine.dropped == {"a": 2, "e": 2, "b": 4, "c": 6}
    assert machine.race.running == [UNTUNED, "d"], "the untuned config is never dropped"


def test_candidates_far_behind_are_dropped_after_one_round() -> None:
    machine = FakeMachine({UNTUNED: 9.0, "a": 2.0, "b": 3.1, "c": 2.9, "wrong": 0.1}, differing=("wrong",))
    machine.race.halve(1, until=1e9)
    assert machine.dropped == {"b": 1, "wrong": 2, "c": 4}, "far behind the fastest of those that may win"
    assert machine.race.running == [UNTUNED, "a"]


def test_candidates_with_other_losses_are_dropped_first() -> None:
    machine = FakeMachine({UNTUNED: 9.0, "wrong": 1.0, "slow": 8.0, "slower": 8.5}, differing=("wrong",))
    machine.race.halve(1, until=1e9)
    assert machine.race.running == [UNTUNED, "slow"]


def test_the_time_ends_the_rounds_but_each_candidate_has_one() -> None:
    machine = FakeMachine({UNTUNED: 9.0, "a": 4.0, "b": 3.0})
    machine.now = 100.0
    machine.race.halve(1, until=50.0)
    assert machine.order == [UNTUNED, "a", "b"]
    machine.race.run(10, until=50.0, at_least=3)
    assert machine.order[3:] == [UNTUNED, "b"] * 3


def test_a_candidate_that_fails_leaves_the_race() -> None:
    machine = FakeMachine({UNTUNED: 9.0, "a": [4.0, None], "b": 5.0})
    machine.race.run(3, until=1e9)
    assert machine.race.running == [UNTUNED, "b"]
    assert machine.race.rounds["a"] == [4.0]
    alone = FakeMachine({UNTUNED: 9.0})
    alone.race.run(30, until=1e9)
    assert alone.order == [UNTUNED], "more rounds would compare it with nothing"


@pytest.mark.parametrize("from_round", [1, 2, 5])
def test_a_machine_that_becomes_slower_slows_all_candidates_equally(from_round: int) -> None:
    def rounds(quiet: float, number: int = 40) -> list[float | None]:
        return [quiet * (1.0 if each < from_round else 1.3) for each in range(number)]

    machine = FakeMachine({UNTUNED: rounds(10.0), "a": rounds(5.2), "b": rounds(5.0), "c": rounds(5.5)})
    machine.race.halve(1, until=1e9)
    machine.race.run(10, until=1e9)
    machine.race.enter("late")  # all its rounds are slow
    machine.set("late", rounds(4.8)[from_round:])
    machine.race.run(10, until=1e9)
    assert machine.race.ranking() == ["late", "b", UNTUNED]
    assert machine.race.ratios["late"] == pytest.approx([0.48] * 10)
    assert machine.race.ratios["b"] == pytest.approx([0.5] * len(machine.race.rounds["b"]))


def entry(
    name: str, low: float, high: float, *, may_win: bool = True, changes: int = 1, dropped: bool = False
) -> Entry:
    spread = Spread((low + high) / 2, low, high)
    return Entry(name, spread, Spread(spread.median / 11, low / 11, high / 11), may_win, changes, dropped)


OWN = entry(UNTUNED, 10, 12, changes=0)


@pytest.mark.parametrize(
    ("entries", "winner"),
    [
        ([], UNTUNED),
        ([entry("overlaps", 7, 10.5)], UNTUNED),
        ([entry("fast", 7, 8), entry("faster", 5, 6)], "faster"),
        ([entry("faster, other losses", 5, 6, may_win=False), entry("fast", 7, 8)], "fast"),
        ([entry("other losses", 5, 6, may_win=False)], UNTUNED),
        ([entry("many", 5, 6, changes=3), entry("few", 5.1, 6.1)], "few"),
        ([entry("faster, but dropped", 5, 6, dropped=True), entry("fast", 7, 8)], "fast"),
        ([entry("dropped", 5, 6, dropped=True), entry("overlaps", 7, 10.5)], "dropped"),
        ([dataclasses.replace(entry("in quiet rounds", 5, 6), ratios=Spread(1.0, 0.9, 1.1))], UNTUNED),
        ([entry("wide but best", 1, 10.5), entry("narrow", 7, 9)], "narrow"),
    ],
)
def test_the_winner(entries: list[Entry], winner: str) -> None:
    assert choose(entries, OWN).name == winner


def test_the_range_leaves_out_outliers_if_there_are_many_rounds() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, *[2.0] * 6]) == Spread(2.0, 1.0, 2.0)
    assert Spread.of([1.0, *[2.0] * 6, 50.0]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([1.0, 1.0, *[2.0] * 12, 50.0, 60.0]) == Spread(2.0, 2.0, 2.0)


def test_lengths_of_calls_and_rounds() -> None:
    assert steps_in_call(0.01) == 50
    assert steps_in_call(0.01, target_s=0.1) == 10
    assert steps_in_call(1.0, target_s=0.1) == 1
    assert steps_in_call(1e-9, target_s=0.1) == 64
    assert steps_of_round(0.01, 10, 0.4) == 40
    assert steps_of_round(0.01, 7, 0.4) == 42
    assert steps_of_round(3.0, 1, 0.4) == 1


@pytest.mark.parametrize(
    ("length", "expected"), [(1000, 40), (51, 40), (50, 30), (47, 30), (31, 20), (30, 0), (12, 0), (3, 0)]
)
def test_a_round_is_shortened_to_a_pass_that_is_hardly_shorter(length: int, expected: int) -> None:
    """The untimed call comes before it."""
    from distlaunch.training.trials.rounds import steps_within_pass

    assert steps_within_pass(RoundOrder(1, 40, 10, 10), length) == expected


def test_orders_and_results_of_rounds_in_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert RoundOrder.read(path) is None
    assert RoundResult.read(path) is None
    order = RoundOrder(3, 20, 10, 10, checks_calls=True)
    order.write(path)
    assert RoundOrder.read(path) == order
    RoundResult(3, 0.25).write(path)
    assert RoundResult.read(path) == RoundResult(3, 0.25)


def test_checkpoints_of_a_candidate_on_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reference = RunDir(tmp_path / "reference")
    for step in (0, 10):
        folder = reference.checkpoints / checkpoint_name(step)
        folder.mkdir(parents=True)
        (folder / "state").write_bytes(b"weights")
    run = Contestant.run_dir(reference, 10)
    assert [path.read_bytes() for path in run.checkpoints.glob("*/state")] == [b"weights"] * 2


# equality


def series(losses: list[float], weight: float | None = 1e-7) -> Series:
    return Series([{"loss": loss} for loss in losses], [], None if weight is None else {"kernel": weight})


ONE_DEVICE = Record(1, series([1.0, 0.9, 0.8], None), rows=(8, 8, 8), noise=(series([1.0, 0.9, 0.8 + 1e-7]),))


@pytest.mark.parametrize(
    ("losses", "weight", "equal"),
    [([1.0, 0.9, 0.8], 1e-7, True), ([1.0, 0.9, 0.8], 1e-2, False), ([1.0, 0.9, 0.81], 1e-7, False)],
)
def test_losses_and_weights_are_those_of_one_device(losses: list[float], weight: float, equal: bool) -> None:
    own = Record(2, series([1.0, 0.9, 0.8]))
    assert judge_candidate(Record(1, series(losses, weight)), own, ONE_DEVICE).equal is equal


@pytest.mark.parametrize(("losses", "equal"), [([1.0, 0.8, 0.6], True), ([1.0, 0.9, 0.8], False)])
def test_an_untuned_config_with_other_numbers_than_one_device_is_the_rule(losses: list[float], equal: bool) -> None:
    """A config that differs from one device by itself keeps its numbers, for example with BatchNormalization."""
    own = Record(2, series([1.0, 0.8, 0.6], 0.5))
    assert judge_candidate(Record(2, series(losses, 0.5)), own, ONE_DEVICE).equal is equal


def test_known_causes_of_other_losses() -> None:
    own, mesh = config(), config(strategy={"kind": "jax", "mesh": {"batch": 1}})
    facts = ModelFacts(batch_norm=("bn",), embeddings=("words",))
    assert [each.partition(":")[0] for each in known_causes(mesh, own, facts, has_sparse_gradients=True)] == [
        "BatchNormalization bn", "Embedding words",
    ]  # fmt: skip
    assert len(known_causes(own, own, facts, has_sparse_gradients=True)) == 1
    assert not known_causes(config(synchronize_batch_norm=True), own, facts, has_sparse_gradients=False)


# the table

EQUAL = Judgement(None, 1e-7, None, 1e-7)
OTHER = dataclasses.replace(EQUAL, first_step=2, losses=(("loss", 0.1),))


def result(**given: object) -> TuneResult:
    own = config()
    fast = Candidate(own, "jax, batch 1", {"kind": "jax", "mesh": {"batch": 1}}, {})
    xla = untuned(own).with_change(Change("XLA", {("compile", "jit_compile"): True}))
    off = untuned(own).with_change(Change("oneDNN off", environ={ONEDNN: "0"}))
    half = untuned(own).with_change(Change("bf16", {("precision",): "mixed_bfloat16"}, is_16_bit=True))
    rows = [
        Row(untuned(own), rounds=[0.010, 0.012, 0.011], ratios=[1.0, 1.0, 1.0], judgement=EQUAL, memory_bytes=10**9),
        Row(fast, rounds=[0.005, 0.006, 0.0055], ratios=[0.49, 0.45, 0.47], judgement=EQUAL, memory_bytes=10**8),
        Row(xla, rounds=[0.001], ratios=[0.1], judgement=OTHER, causes=["because"]),
        Row(half, rounds=[0.002], ratios=[0.2], judgement=OTHER),
        Row(off, failed="worker:0 failed: ValueError: no"),
    ]
    found = TuneResult("one_device", rows, [NotTried("dtensor, batch 2", "no time")], rows[1], batch=24.0)
    return dataclasses.replace(found, **given)  # pyright: ignore[reportArgumentType]


def test_the_table_names_the_winner_and_what_was_not_tried() -> None:
    text = "\n".join(table_lines(result()))
    assert "jax, batch 1 *" in text
    assert "11.0" in text
    assert "10.0 to 12.0" in text
    assert "4,364" in text  # 24 examples in 5.5 ms
    assert "differ from step 2 (the loss)" in text
    assert "16 bits, off by 1e-07" in text
    assert "  - because" in text
    assert "untuned (one_device), oneDNN off: failed, and dropped: worker:0 failed: ValueError: no" in text
    assert "dtensor, batch 2: no time" in text
    assert "* jax, batch 1 is the fastest: a step takes 0.47 of the untuned time." in text
    assert "strategy: {kind: jax, mesh: {batch: 1}}" in text


def test_no_difference_beyond_noise() -> None:
    found = result()
    found.rows[1].rounds, found.rows[1].ratios = [0.0115], [1.05]
    text = " ".join(table_lines(dataclasses.replace(found, winner=found.rows[0])))
    assert "No candidate with the same losses is faster than the untuned config, beyond noise." in text
    assert "--allow-16-bit" in text


@pytest.mark.parametrize("allows", [False, True])
def test_a_candidate_with_too_few_rounds_is_no_winner_but_named(allows: bool) -> None:
    found = result(allows_16_bit=allows)
    found.rows[1].judgement = OTHER
    text = " ".join(table_lines(dataclasses.replace(found, winner=found.rows[0])))
    assert ("faster so far: untuned (one_device), bf16" in text) == allows
    assert ("--allow-16-bit" in text) != allows
    found.rows[1].judgement = EQUAL
    text = " ".join(table_lines(dataclasses.replace(found, winner=found.rows[0])))
    assert "faster so far: jax, batch 1" in text


def test_a_winner_with_variables_prints_them() -> None:
    found = result()
    off = Row(
        untuned(config()).with_change(Change("oneDNN off", environ={ONEDNN: "0"})),
        rounds=[0.001] * 3,
        ratios=[0.1] * 3,
        judgement=EQUAL,
    )
    text = "\n".join(table_lines(dataclasses.replace(found, rows=[*found.rows[:4], off], winner=off)))
    assert f"export {ONEDNN}=0" in text


def test_json() -> None:
    plain = json.loads(as_json(result()))
    assert (plain["winner"], plain["is_faster"]) == ("jax, batch 1", True)
    assert [row["equal"] for row in plain["rows"]] == [True, True, False, False, None]
    assert plain["rows"][1]["keys"] == {"strategy": {"kind": "jax", "mesh": {"batch": 1}}}
    assert plain["rows"][1]["step_ms"] == 5.5
    assert plain["not_tried"] == [{"candidate": "dtensor, batch 2", "reason": "no time"}]


# the written file

TEXT = """\
# mine
model: {function: "distlaunch.workloads.images:cnn"}  # a model
data:
  function: distlaunch.workloads.images:fashion_mnist  # data
  global_batch: 24
compile: {optimizer: sgd, loss: mse}
strategy:
  kind: multi_worker_mirrored   # processes
# the number of them
cluster:
  workers: 2  # two
# the end
"""


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({("strategy",): {"kind": "jax", "mesh": {"batch": 2}}}, {"strategy": {"kind": "jax", "mesh": {"batch": 2}}}),
        ({("cluster", "workers"): 4}, {"cluster": {"workers": 4}}),
        ({("train", "steps_per_call"): 16}, {"train": {"steps_per_call": 16}}),
        ({("train", "steps_per_call"): "auto", ("precision",): "mixed_bfloat16"},
         {"train": {"steps_per_call": "auto"}, "precision": "mixed_bfloat16"}),
        ({("compile", "jit_compile"): True}, {"compile": {"optimizer": "sgd", "loss": "mse", "jit_compile": True}}),
        ({("cluster", "stop_timeout_s"): 3.5}, {"cluster": {"workers": 2, "stop_timeout_s": 3.5}}),
    ],
)  # fmt: skip
def test_keys_are_changed_in_place_and_comments_stay(
    keys: dict[tuple[str, ...], object], values: dict[str, object]
) -> None:
    found = changed_text(TEXT, keys)
    assert found is not None
    assert yaml.safe_load(found) == {**yaml.safe_load(TEXT), **values}
    for comment in ("# mine", "# a model", "# data", "# the number of them", "# the end"):
        assert comment in found
    assert changed_text(TEXT, {}) == TEXT


@pytest.mark.parametrize("name", ["fashion_mnist", "fashion_mnist_servers", "mnist_mlp_jax", "sentiment"])
def test_the_changed_file_of_a_real_config_is_read_as_the_candidate(name: str, tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / f"configs/{name}.yaml"
    own = load_config(file, (), {}).config
    (*_, candidate) = (each for each in strategies(own, here(2, 0)) if isinstance(each, Candidate))
    candidate = candidate.with_change(Change("calls", {("train", "steps_per_call"): 4}))
    found = changed_text(file.read_text(), candidate.keys)
    assert found is not None
    (tmp_path / file.name).write_text(found)
    assert load_config(tmp_path / file.name, (), {}).config == candidate.config
    assert found.count("#") == file.read_text().count("#")


@pytest.mark.parametrize(
    ("first_line", "overrides", "name"),
    [("# mine\n", ("seed=1",), "tuned"), ("name: mine\n", ("seed=1",), "mine"), ("# mine\n", ("name=b",), "b")],
)
def test_a_complete_copy_has_a_name_of_its_own(
    first_line: str, overrides: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "mine.yaml", tmp_path / "tuned.yaml"
    source.write_text(TEXT.replace("# mine\n", first_line))
    row = Row(untuned(load_config(source, (*overrides, "train.epochs=3"), {}).config))
    write_winner(str(source), str(target), {}, TuneResult(rows=[row], winner=row), [])
    assert "# complete config with all defaults" in target.read_text()
    assert load_config(target, (), {}).config.name == name


# refusals


@pytest.mark.parametrize(
    ("settings_of", "expected"),
    [
        (["data.sharding=function", "train.steps_per_epoch=2"], "data.sharding"),
        (
            ["strategy={kind: parameter_server}", "cluster={workers: 2, ps: 1}", "train.steps_per_epoch=2"],
            "asynchronously",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(settings_of: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def data(context=None):\n    return [0]\n")
    (tmp_path / "mine.yaml").write_text(
        "model: {function: distlaunch.workloads.images:cnn}\ndata: {function: mine.py:data, global_batch: 8}\n"
    )
    words = [word for each in settings_of for word in ("--set", each)]
    found = CliRunner().invoke(cli, ["tune", str(tmp_path / "mine.yaml"), *words])
    assert isinstance(found.exception, UsageError)
    assert expected in str(found.exception)


@pytest.mark.parametrize("target", ["no/new.yaml", ".", "mine.yaml", "/proc/new.yaml"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(target: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TEXT)
    found = CliRunner().invoke(cli, ["tune", str(tmp_path / "mine.yaml"), "--write", str(tmp_path / target)])
    assert isinstance(found.exception, UsageError)
    assert "--write: got " in str(found.exception)
