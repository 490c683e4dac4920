"""Jobs of several processes where the environment names a proxy, which would swallow what they say to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_job import LOSSES, MODULE, losses, run_command, write_job

PROXIES = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://192.0.2.1:3128", "NO_PROXY": ".corp"}
"""One that refuses connections, and one that never answers."""
SCRIPTS = Path(__file__).with_name("scripts")


def test_the_expected_losses_are_those_of_fit() -> None:
    names: dict[str, Any] = {}
    exec(MODULE, names)
    history = names["model"]().fit(*names["data"](), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert [round(loss, 4) for loss in history["loss"]] == LOSSES


@pytest.mark.parametrize(
    ("strategy", "cluster"),
    [
        ({"kind": "multi_worker_mirrored"}, {"workers": 2}),
        pytest.param({"kind": "jax", "mesh": {"batch": 2}}, {"workers": 2}, marks=pytest.mark.slow),
        pytest.param({"kind": "dtensor", "mesh": {"batch": 2}}, {"workers": 2}, marks=pytest.mark.slow),
    ],
    ids=["multi_worker_mirrored", "jax", "dtensor"],
)
def test_a_job_of_two_processes(tmp_path: Path, strategy: dict[str, Any], cluster: dict[str, Any]) -> None:
    write_job(tmp_path, strategy=strategy, cluster=cluster)
    done = run_command("train", "job.yaml", cwd=tmp_path, env=PROXIES)
    assert done.code == 0, done.text
    assert losses(tmp_path) == LOSSES
    assert "proxy" not in done.text


@pytest.mark.slow
@pytest.mark.parametrize("hosting", ["processes", "in_process"])
def test_parameter_servers(tmp_path: Path, hosting: str) -> None:
    cluster = {"workers": 1, "ps": 1, "hosting": hosting}
    write_job(tmp_path, strategy={"kind": "parameter_server"}, cluster=cluster)
    done = run_command("train", "job.yaml", cwd=tmp_path, env={"grpc_proxy": "http://127.0.0.1:9"})
    assert done.code == 0, done.text
    assert losses(tmp_path) == LOSSES


@pytest.mark.slow
def test_a_script_on_jax(tmp_path: Path) -> None:
    words = ("run", "--jax", "--workers", "2", SCRIPTS / "jax_processes.py")
    done = run_command(*words, cwd=tmp_path, env=PROXIES)
    assert done.code == 0, done.text
    assert done.out.count("sum 3.0") == 2
