"""Tests of the processes that import modules before a start, and of whether the start uses them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distlaunch.agent import warm_starts
from distlaunch.agent.messages import Preload
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hardware import INJECTED, ONEDNN
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.spec import ClusterSpec, Place
from distlaunch.config.run import RunConfig
from distlaunch.engines import local
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import allocate, import_ahead
from distlaunch.plan.train import cluster_at, plan_launch
from distlaunch.verify.trials import KINDS, PlannedTrial, plan_trials


class _Imports:
    """Processes that never come to the end of their imports."""

    def __init__(self) -> None:
        self.spawned: list[Preload] = []
        self.unfit: str | None = None
        self.was_fit = False

    def spawn(self, interpreter: str, preload: Preload, env: Mapping[str, str]) -> _Imports:
        self.spawned.append(preload)
        return self

    def close(self) -> None: ...


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> _Imports:
    made = _Imports()
    monkeypatch.setattr(warm_starts.WarmProcess, "spawn", made.spawn)
    return made


def _config(**changes: Any) -> RunConfig:
    given = {"name": "a", "model": {"function": "a:b"}, "data": {"function": "a:c", "global_batch": 4}}
    return RunConfig.model_validate({**given, **changes})


def _trials() -> Sequence[PlannedTrial]:
    return [each for each in plan_trials(_config(), KINDS, (2, 4), 0) if not each.verdict]


def test_one_process_for_each_backend_serves_all_trials(tmp_path: Path, imports: _Imports) -> None:
    trials, run = _trials(), RunDir(tmp_path)
    context = LaunchContext.resolve(_config(), Machine.here())
    for each in trials:
        import_ahead(each.config, run, "verify", context)
    assert [each.arguments for each in imports.spawned] == [("tensorflow",), ("jax",)]
    for each in trials:  # as a start does it: with ports of its own, in another attempt
        allocation = allocate(each.config, context)
        try:
            addresses = [place.address for place in allocation.places if place.address]
            cluster = cluster_at(each.config.strategy.processes(each.config.cluster) if addresses else {}, addresses)
            plan = plan_launch(each.config, run, 3, "verify", cluster, places=allocation.places)
            assert isinstance(allocation, local.LocalAllocation)
            assert all(allocation.warm_starts.process_for(allocation.spec_of(task)) is imports for task in plan.tasks)
        finally:
            allocation.release()
    assert len(imports.spawned) == 2


def test_a_process_that_was_imported_with_other_settings_is_not_used(tmp_path: Path, imports: _Imports) -> None:
    """TensorFlow reads some variables while it is imported."""
    warm_processes = warm_starts.WarmStarts()
    facts = {"system": "linux", "architecture": "x86_64"}
    run, spawned = RunDir(tmp_path), list[int]()
    # without AVX2; with it; with more, which gives the same settings; and what the user sets
    for features, given in ([], {}), (["avx2"], {}), (["avx2", "avx_vnni"], {}), (["avx2"], {ONEDNN: "0"}):
        machine = Machine({INJECTED: json.dumps({**facts, "features": features}), **given})
        plan = plan_launch(_config(), run, 0, "train", ClusterSpec({}), places=[Place(hardware=machine.hardware)])
        allocation = local.LocalAllocation({}, warm_processes)
        assert warm_processes.process_for(allocation.spec_of(plan.tasks[0])) is imports
        spawned.append(len(imports.spawned))
    assert spawned == [1, 2, 2, 2]  # the last is that of the first


def test_a_config_that_cannot_start_is_left_to_its_start(tmp_path: Path, imports: _Imports) -> None:
    config = _config(cluster={"workers": 2, "ports": [1024]}, strategy={"kind": "multi_worker_mirrored"})
    import_ahead(config, RunDir(tmp_path), "verify", LaunchContext.resolve(config, Machine.here()))
    assert not imports.spawned
