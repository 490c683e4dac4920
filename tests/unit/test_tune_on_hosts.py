"""Parts of `tune` for hosts of an engine: their slots and hardware, candidates, engines, and messages of hosts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from distlaunch.base.run_dir import RunDir, checkpoint_name
from distlaunch.base.run_files.trial_records import MemoryReport, RoundOrder, RoundResult
from distlaunch.cluster.hardware import ONEDNN, POOL_SIZES, Hardware
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import kept_variables
from distlaunch.cluster.spec import Place
from distlaunch.config.engines.ssh import Ssh
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import HostFiles
from distlaunch.engines.context import LaunchContext
from distlaunch.engines.remote.allocation import forwarded
from distlaunch.plan.train import LaunchPlan
from distlaunch.tune.candidates import Candidate, NotTried, settings, strategies, untuned
from distlaunch.tune.contestant import Contestant, TrialFailed, TrialTasks
from distlaunch.tune.contexts import Contexts
from distlaunch.tune.site import Site, common_hardware, hosts_of, site_at
from tests.unit.test_tune import config

CPU = Hardware("linux", "x86_64", "some CPU", ("avx2", "avx512_vnni"), 4, usable_cores=range(4))


def places(*slots: int, hardware: Hardware = CPU, gpus: int = 0) -> list[Place]:
    """Return a place for each slot of the hosts a, b and so on."""
    own = tuple(map(str, range(gpus)))
    return [Place(host, "", own, hardware=hardware) for host, number in zip("abcd", slots, strict=False)
            for _ in range(number)]  # fmt: skip


def mirrored(workers: int) -> RunConfig:
    return config(
        strategy={"kind": "multi_worker_mirrored"}, cluster={"workers": workers}, engine={"kind": "ssh", "hosts": ["a"]}
    )


def names(found: RunConfig, site: Site) -> tuple[list[str], dict[str, str]]:
    """Return the strategies that are tried, and the reasons of the others."""
    each = list(strategies(found, site))
    tried = [one.name for one in each if isinstance(one, Candidate)]
    return tried, {one.name: one.reason for one in each if isinstance(one, NotTried)}


# hosts


def test_candidates_use_the_hosts_of_the_config() -> None:
    every = places(1, 2, 1)
    assert hosts_of(mirrored(2), every[:2], every) == {"a", "b"}
    assert hosts_of(config(), every[:1], every) == {"a", "b", "c"}, "one task gives no number of hosts"
    site = site_at(every, 4, ("warning: a is slow", "no task runs on d"))
    assert (site.hosts, site.slots, site.notes) == (("a", "b", "c"), (1, 2, 1), ("a is slow",))
    assert site.worker_counts == [4]
    assert site_at(places(2, 2), 3).worker_counts == [4, 3]
    assert site_at(places(2, 2), 2).worker_counts == [4], "two workers would leave out the second host"
    assert site_at(places(4, 4), 6).workers_per_host(mirrored(6)) == 4


def test_settings_are_chosen_for_the_weakest_of_different_hosts() -> None:
    weak = CPU._replace(usable_cores=range(2), features=("avx2",))
    found = common_hardware([CPU._replace(environ={"NPROC": "3"}), weak._replace(environ={ONEDNN: "0"})])
    assert (found.num_cores, list(found.features)) == (2, ["avx2"])
    assert found.environ == {"NPROC": "3", ONEDNN: "0"}
    assert kept_variables(common_hardware([CPU, weak])) == {ONEDNN: "1"}
    assert kept_variables(common_hardware([CPU, weak._replace(features=())])) == {ONEDNN: "0"}
    assert not kept_variables(common_hardware([CPU, weak._replace(architecture="aarch64")]))


# candidates


def test_strategies_use_all_hosts_or_one_device() -> None:
    tried, others = names(mirrored(2), site_at(places(1, 1), 2))
    assert tried == [
        *("one_device", "jax, batch 1", "jax, batch 2, 2 workers", "dtensor, batch 2, 2 workers"),
        *("jax, batch 4, 2 workers", "dtensor, batch 4, 2 workers"),
    ]
    assert "asynchronously" in others["parameter_server"]
    assert "one host only" in others["mirrored"]
    tried, _ = names(config(engine={"kind": "ssh", "hosts": ["a"]}), site_at(places(2, 1), 1))
    assert tried[:2] == ["jax, batch 1", "multi_worker_mirrored, 3 workers, 3 replicas"]


def test_workers_share_the_gpus_of_their_host() -> None:
    tried, _ = names(mirrored(2), site_at(places(1, 1, gpus=4), 2))
    assert "jax, batch 8, 2 workers" in tried
    tried, _ = names(mirrored(8), site_at(places(4, 4, gpus=4), 8))
    assert "jax, batch 8, 8 workers" in tried


def test_one_other_host_is_like_this_machine_with_its_slots() -> None:
    tried, others = names(config(engine={"kind": "ssh", "hosts": ["a"]}), site_at(places(2), 1))
    assert {"mirrored, 4 replicas", "multi_worker_mirrored, 2 workers, 2 replicas"} <= {*tried}
    assert others["multi_worker_mirrored, 4 workers, 4 replicas"] == "a has 2 slots for workers"


def test_threads_are_those_of_the_tasks_on_one_host() -> None:
    site = site_at(places(1, 1), 2)
    found = [each for each in settings(untuned(mirrored(2)), site) if isinstance(each, Candidate)]
    assert [each.environ["NPROC"] for each in found if "NPROC" in each.environ] == ["1", "2"]
    assert forwarded(dict.fromkeys(POOL_SIZES, "2"), ()) == dict.fromkeys(POOL_SIZES, "2"), "other hosts get them"


def test_the_number_of_workers_is_counted_once() -> None:
    own = config(strategy={"kind": "multi_worker_mirrored"}, cluster={"workers": "auto"},
                 engine={"kind": "ssh", "hosts": ["a"]})  # fmt: skip
    tried, _ = names(own, site_at(places(1, 1), 2))
    assert not any(name.startswith("multi_worker_mirrored") for name in tried), "the untuned config has two workers"


# engines


class _Engine:
    def __init__(self, *, is_here: bool) -> None:
        self.uses_this_machine_only, self.num_entered = is_here, 0

    def __enter__(self) -> _Engine:
        self.num_entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.num_entered -= 1


@pytest.mark.parametrize("is_here", [True, False])
def test_only_this_machine_runs_several_candidates_in_an_engine(*, is_here: bool, monkeypatch: Any) -> None:
    made: list[_Engine] = []

    def make(*_: object) -> _Engine:
        made.append(_Engine(is_here=is_here))
        return made[-1]

    monkeypatch.setattr("distlaunch.engines.context.make_engine", make)
    base = LaunchContext(Machine({"A": "1"}), Ssh(kind="ssh", hosts=["a"]), HostFiles())
    with Contexts(base) as contexts:
        first, second = contexts.take({}), contexts.take({})
        other = contexts.take({"B": "2"})
        assert (first.engine is second.engine) is is_here
        assert other.engine is not first.engine
        assert other.machine.environ == {"A": "1", "B": "2"}
        contexts.give_back(second, {})
        assert contexts.take({}).engine is second.engine
    assert all(engine.num_entered == 0 for engine in made)


# messages


@pytest.mark.parametrize(
    "text", ["", "[]", '{"number": 1}', '{"number": 1, "step_s": "x"}', '{"number": 1, "step_s": -1}',
             '{"number": 1, "step_s": NaN}', '{"number": 1, "step_s": 1, "more": 2}'],
)  # fmt: skip
def test_a_malformed_result_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=r"file|Expecting"):
        RoundResult.read(tmp_path / "file")


class _Starter:
    """A starter whose tasks answer each order at once, as long as they have answers."""

    def __init__(self, run: RunDir, answers: list[str]) -> None:
        self._run, self._answers = run, answers
        self.orders: list[RoundOrder] = []

    def send_file(self, path: Path) -> None:
        assert path == self._run.round_order(0)
        order = RoundOrder.read(path)
        assert order is not None, "it was written just now"
        self.orders.append(order)
        self._run.round_result(0).write_text(self._answers.pop(0))


def contestant(tmp_path: Path, *answers: str, own: RunConfig | None = None, step_s: float = 0.01) -> Contestant:
    reference, candidate = RunDir.claim(tmp_path, "reference"), untuned(own or config())
    for step in (0, 10):
        (reference.checkpoints / checkpoint_name(step)).mkdir(parents=True)
    run = Contestant.run_dir(reference, 10)
    run.task(0, "worker:0").path.mkdir(parents=True)
    context = LaunchContext(Machine({}), Ssh(kind="ssh", hosts=["a"]), HostFiles())
    found = Contestant(candidate, run, context, 10, 0.4, 2, lambda: None)
    starter: Any = _Starter(run, list(answers))
    found.tasks.take_starter(starter)
    RoundResult(0, step_s).write(run.round_result(0))
    return found


def test_rounds_of_a_contestant(tmp_path: Path) -> None:
    found = contestant(
        tmp_path, '{"number": 1, "step_s": 0.5, "waits": 0.0}', '{"number": 2, "step_s": 0.25, "waits": 0.0}', "{"
    )
    try:
        assert not found.is_prepared(), "it trains the same steps in longer calls"
        assert found.is_prepared()
        assert found.step_s == 0.5
        assert found.measure() == found.step_s == 0.25
        with pytest.raises(TrialFailed, match="cannot be read"):
            found.measure()
        with pytest.raises(TrialFailed, match="cannot be read"):
            found.record()
        files = found.run.task(0, "worker:0").memory
        report = MemoryReport("a", 5, 7)
        report.write(files)
        assert found.memory() == [report]
        files.write_text('{"host": "a"}')
        assert not found.memory()
    finally:
        found.close()
    assert not found.run.path.parent.exists()


def test_a_contestant_that_stands_still_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round, which compiles, may take the rest of the budget."""
    monkeypatch.setattr("distlaunch.tune.contestant._ROUND_LIMIT_S", 0.05)
    monkeypatch.setattr("distlaunch.tune.contestant._ROUND_LIMIT", 0)
    found = contestant(
        tmp_path, *['{"number": 1, "step_s": 0.5, "waits": 0.0}'] * 3
    )  # the last answers are those to the round before
    try:
        found.is_prepared()
        assert found.is_prepared()
        with pytest.raises(TrialFailed) as failed:
            found.measure()
        assert "a round had no result after 0 s" in str(failed.value.result)
    finally:
        found.close()


@pytest.mark.parametrize(("limit", "ends"), [(0, True), (1e9, False)])
def test_longer_calls_may_take_some_times_as_long_as_the_recorded_steps(
    limit: float, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlaunch.tune.contestant._ROUND_LIMIT_S", 0.0)
    monkeypatch.setattr("distlaunch.tune.contestant._ROUND_LIMIT", 0)
    monkeypatch.setattr("distlaunch.tune.contestant._PREPARE_LIMIT", limit)
    monkeypatch.setattr(TrialTasks, "start", lambda self: None)
    found = contestant(tmp_path, '{"number": 0, "step_s": 0.5, "waits": 0.0}')
    found.start()
    try:
        assert not found.is_prepared()
        if ends:
            with pytest.raises(TrialFailed):
                found.is_prepared()
        else:
            assert not found.is_prepared()
    finally:
        found.close()


@pytest.mark.parametrize(("waits", "untimed"), [(0.01, [6, 1, 1]), (0.3, [6, 6, 6])])
def test_if_input_is_slow_rounds_use_up_the_batches_that_are_ready(
    waits: float, untimed: list[int], tmp_path: Path
) -> None:
    answers = [f'{{"number": {n}, "step_s": 0.01, "waits": {waits}}}' for n in (1, 2, 3)]
    found = contestant(tmp_path, *answers, own=config(train={"steps_per_call": 1}))
    try:
        found.is_prepared()
        assert found.is_prepared()
        found.measure()
        found.measure()
        starter: Any = found.tasks.starter
        assert [order.untimed_steps for order in starter.orders] == untimed
    finally:
        found.close()


@pytest.mark.parametrize(("step_s", "steps"), [(0.001, 64), (0.03, 8), (0.1, 5), (2.0, 1)])
def test_calls_are_shorter_than_in_training_but_make_as_many_steps_together(
    step_s: float, steps: int, tmp_path: Path
) -> None:
    found = contestant(tmp_path, f'{{"number": 0, "step_s": {step_s}, "waits": 0.0}}', step_s=step_s)
    try:
        found.is_prepared()
        starter: Any = found.tasks.starter
        assert [order.steps_per_call for order in starter.orders] == [steps]
    finally:
        found.close()


def test_a_host_sends_at_once_what_the_launcher_waits_for(tmp_path: Path) -> None:
    from distlaunch.cluster.spec import Task
    from distlaunch.engines.remote.run_files import replaced_by_tasks
    from distlaunch.plan.train import TaskPlan

    run = RunDir(tmp_path)
    tasks = tuple(TaskPlan(Task("worker", n), (), {}, run.task(0, f"worker:{n}")) for n in (0, 1))
    plan = LaunchPlan(tmp_path, 0, "verify", tasks, 1, 1)
    assert replaced_by_tasks(plan) == [
        *("attempts/0/worker-0/memory", "attempts/0/worker-1/memory"),
        *("attempts/0/record.json", "attempts/0/round-result.json"),
    ]
    assert not replaced_by_tasks(dataclasses.replace(plan, mode="train"))
