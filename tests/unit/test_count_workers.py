"""`cluster.workers: auto`: as many as there are places for, and as can share the work."""

from __future__ import annotations

from typing import Any

import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.config.run import RunConfig
from distlaunch.engines import LocalEngine
from distlaunch.jobs.attempt import count_workers

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
def test_as_many_as_there_are_places_for(config: RunConfig, environ: dict[str, str], expected: int) -> None:
    counted = count_workers(config, environ, dry=True)
    assert counted.cluster.workers == expected
    assert config.cluster.workers in ("auto", expected)


def test_streams_decide_too() -> None:
    data = {"function": "a:c", "global_batch": 12, "streams": 6}
    config = _config(MULTI, data=data, **_hosts("a slots=5"))
    assert count_workers(config, {}, dry=True).cluster.workers == 3


def test_what_fits_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(MULTI, data={"function": "a:c", "global_batch": 12, "streams": 5, "sharding": "function"})
    monkeypatch.setattr(LocalEngine, "count_slots", lambda self, environ, dry: 2)
    with pytest.raises(ConfigError, match="streams"):
        count_workers(config, {})
