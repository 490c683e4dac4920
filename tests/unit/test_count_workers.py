"""`cluster.workers: auto`: as many as there are places for, and as can share the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.cluster.hosts import TooFewSlotsError, place_tasks
from distlaunch.cluster.machine import Machine
from distlaunch.config.checks.config import cross_check, fitting_workers
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Needs
from distlaunch.engines.context import LaunchContext
from distlaunch.engines.local import LocalEngine
from distlaunch.engines.remote.host_failures import HostFailures
from distlaunch.jobs.attempt import allocate_fitting, count_workers, min_workers
from tests.unit.fake_nvml import FakeGpu, FakeNvml

MULTI = {"kind": "multi_worker_mirrored"}
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2"}


def _config(strategy: dict[str, Any], workers: Any = "auto", **changes: Any) -> RunConfig:
    given = {"name": "a", "model": {"function": "a:b"}, "data": {"function": "a:c", "global_batch": 12}}
    return RunConfig.model_validate({**given, "strategy": strategy, "cluster": {"workers": workers}, **changes})


def _hosts(*hosts: str) -> dict[str, Any]:
    return {"engine": {"kind": "ssh", "hosts": list(hosts)}}


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        (_config(MULTI), {}, 1),
        (_config(MULTI), GPUS, 3),
        (_config(MULTI, 2), GPUS, 2),
        (_config(MULTI, **_hosts("a", "b slots=4")), GPUS, 5),
        # four devices are shared by four processes, two, or one
        (_config({"kind": "jax", "mesh": {"batch": 4}}, **_hosts("a slots=3")), {}, 2),
        (_config(MULTI, **_hosts("a", "b")), {"TF_CONFIG": "of another cluster, which ssh does not join"}, 2),
        (
            _config(MULTI),
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 1}}'},
            3,
        ),
    ],
)
def test_as_many_as_there_are_places_for(
    config: RunConfig, environ: dict[str, str], expected: int, driver: Callable[[FakeNvml], FakeNvml]
) -> None:
    driver(FakeNvml([FakeGpu(f"GPU-{number}") for number in range(3)] if environ is GPUS else []))
    counted = count_workers(config, LaunchContext.resolve(config, Machine(environ)), dry=True)
    assert counted.cluster.workers == expected
    assert config.cluster.workers in ("auto", expected)


def test_streams_decide_too() -> None:
    data = {"function": "a:c", "global_batch": 12, "streams": 6}
    config = _config(MULTI, data=data, **_hosts("a slots=5"))
    assert count_workers(config, LaunchContext.resolve(config, Machine({})), dry=True).cluster.workers == 3


@pytest.mark.parametrize(("slots", "ports", "expected"), [(3, 4, 3), (3, 3, 3), (3, 2, 2), (1, 2, 1)])
@pytest.mark.parametrize("strategy", [MULTI, {"kind": "jax", "mesh": {"batch": 12}}])
def test_no_more_than_there_are_ports_for(slots: int, ports: int, expected: int, strategy: dict[str, Any]) -> None:
    cluster = {"workers": "auto", "ports": list(range(5000, 5000 + ports))}
    config = _config(strategy, cluster=cluster, **_hosts(f"a slots={slots}"))
    assert cross_check(config, None) == []
    assert count_workers(config, LaunchContext.resolve(config, Machine({})), dry=True).cluster.workers == expected


def test_a_span_with_ports_goes_on_with_fewer() -> None:
    cluster = {"workers": {"min": 1, "max": 3}, "ports": [5000, 5001, 5002]}
    config = _config(MULTI, cluster=cluster, **_hosts("a slots=2"))
    assert cross_check(config, None) == []
    assert fitting_workers(config, (2, 1), None) == 2
    short = _config(MULTI, cluster=cluster | {"ports": [5000]})
    assert [problem.key for problem in cross_check(short, None)] == [("cluster", "ports")]


def test_what_fits_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(MULTI, data={"function": "a:c", "global_batch": 12, "streams": 5, "sharding": "function"})
    monkeypatch.setattr(LocalEngine, "count_slots", lambda self, dry: 2)
    with pytest.raises(ConfigError, match="streams"):
        count_workers(config, LaunchContext.resolve(config, Machine({})))


@pytest.mark.parametrize(
    ("workers", "good", "failed", "expected"),
    [
        # fewer workers, before hosts that have failed twice are tried again
        ({"min": 2, "max": 4}, 3, 1, (3, False)),
        ({"min": 2, "max": 4}, 4, 1, (4, False)),
        ({"min": 3, "max": 4}, 1, 2, (3, True)),
        ("auto", 2, 1, (2, False)),
        (3, 2, 1, (3, True)),
        ({"min": 3, "max": 4}, 1, 1, None),
        (3, 1, 1, None),
    ],
)
def test_hosts_that_have_failed_come_after_fewer_workers(
    monkeypatch: pytest.MonkeyPatch, workers: Any, good: int, failed: int, expected: tuple[int, bool] | None
) -> None:
    asked: list[Needs] = []

    def allocate(self: Any, needs: Needs, *, dry: bool) -> str:
        asked.append(needs)
        slots = good + failed * (not needs.avoids_failed_hosts)
        place_tasks(needs.jobs, [slots], ["all"])
        return "an allocation"

    monkeypatch.setattr(LocalEngine, "allocate", allocate)
    config = _config(MULTI, workers, restarts={"window_s": 60})
    context = LaunchContext.resolve(config, Machine({}))
    first = config.with_workers(good + failed if workers == "auto" else config.cluster.num_workers)
    if expected is None:
        with pytest.raises(TooFewSlotsError):
            allocate_fitting(first, context, min_workers(config))
        return
    fitted, _ = allocate_fitting(first, context, min_workers(config))
    assert (fitted.cluster.workers, not asked[-1].avoids_failed_hosts) == expected
    assert {needs.failure_window_s for needs in asked} == {60}


def test_failures_count_once_an_attempt_and_are_forgotten() -> None:
    now = 0.0
    failures = HostFailures(lambda: now)
    assert not failures
    failures.note("a", 1)
    failures.note("a", 1)
    assert (failures.count("a"), failures.count("b")) == (1, 0)
    now = 50.0
    failures.note("a", 2)
    assert failures.count("a", window_s=60) == 2
    now = 70.0
    assert (failures.count("a", window_s=60), failures.count("a")) == (1, 2)
