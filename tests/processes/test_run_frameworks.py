"""Scripts as TensorFlow's and JAX's guides have them, unchanged under `distlaunch run`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import pytest
from supervised import wait_until
from test_run import Runner, end

from distlaunch.base.events import RunEnded, TaskRestarted

SCRIPTS = Path(__file__).with_name("scripts")
LIMIT_S = 150


@pytest.fixture
def runner(run_dir: Path) -> Runner:
    return Runner(run_dir)


def run(runner: Runner, *words: str, **env: str) -> list[str]:
    """The lines of the log of each task's standard output, after a run that ends well."""
    runner.env |= env
    code, out, err = end(runner.start("--name", "job", *words), LIMIT_S)
    assert code == 0, out + err
    attempt = runner.run_dir().attempts()[-1]
    return [line for files in runner.run_dir().tasks(attempt).values() for line in lines_of(files.stdout_log)]


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_jax(runner: Runner) -> None:
    told = run(runner, "--jax", "--workers", "2", str(SCRIPTS / "jax_processes.py"))
    assert [line for line in told if line.startswith("process ")] == [
        "process 0 of 2, sum 3.0",
        "process 1 of 2, sum 3.0",
    ]


@pytest.mark.slow
def test_multi_worker_mirrored(runner: Runner) -> None:
    """Worker 1 is killed on the way; the script goes on from its own checkpoints."""
    words = ["--workers", "2", "--restarts", "1", str(SCRIPTS / "multi_worker.py")]
    told = run(runner, *words, "--kill-at", "4")
    assert [event.status for event in runner.events(RunEnded)] == ["failed", "done"]
    assert told.count("2 replicas, from step 4") == 2
    losses = sorted(line for line in told if line.startswith("step 8 "))
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_preempted_job_goes_on(runner: Runner) -> None:
    """TensorFlow's own handler saves and exits with 42 when SIGTERM comes: the run is stopped, not failed."""
    saved = str(runner.directory / "saved")
    words = ["-q", "--workers", "2", str(SCRIPTS / "multi_worker.py"), "--preemptible", saved, "--steps"]
    process = runner.start("--name", "first", *words, "1000000")
    logs = [runner.run_dir("first").task(0, f"worker:{index}").stdout_log for index in range(2)]
    wait_until(lambda: all("step 3 " in "\n".join(lines_of(log)) for log in logs), timeout_s=LIMIT_S)
    process.send_signal(signal.SIGTERM)
    assert end(process, LIMIT_S)[0] == 4
    assert end(runner.start("--name", "second", *words, "1"), LIMIT_S)[0] == 0
    first = lines_of(runner.run_dir("second").task(0, "worker:0").stdout_log)[0]
    assert int(re.fullmatch(r"2 replicas, from step (\d+)", first)[1]) >= 3  # type: ignore[index]


@pytest.mark.slow
def test_parameter_servers(runner: Runner) -> None:
    told = run(runner, "--workers", "2", "--ps", "2", str(SCRIPTS / "parameter_server.py"))
    losses = [float(line.rpartition(" ")[2]) for line in told if line.startswith("epoch ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 10
    assert any(line.startswith("2 shards, ") for line in told)


@pytest.mark.slow
def test_a_worker_of_parameter_servers_is_killed(runner: Runner) -> None:
    process = runner.start("--workers", "2", "--ps", "1", str(SCRIPTS / "parameter_server.py"), "50")
    run_dir = runner.run_dir("parameter_server")
    wait_until(lambda: "epoch 1 " in "\n".join(lines_of(run_dir.task(0, "chief:0").stdout_log)), timeout_s=LIMIT_S)
    started = json.loads(run_dir.task(0, "worker:1").events.read_text().splitlines()[0])
    os.kill(started["pid"], signal.SIGKILL)
    code, out, err = end(process, LIMIT_S)
    assert code == 0, out + err
    assert [event.restarted_task for event in runner.events(TaskRestarted, "parameter_server")] == ["worker:1"]


@pytest.mark.slow
@pytest.mark.parametrize("servers", [[], ["--ps", "1"]])
@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="needs the package tf_keras")
def test_fit_with_legacy_keras(runner: Runner, servers: list[str]) -> None:
    told = run(runner, "--workers", "2", *servers, str(SCRIPTS / "keras_fit.py"), TF_USE_LEGACY_KERAS="1")
    assert sum(line.startswith("losses ") for line in told) == (1 if servers else 2)


@pytest.mark.slow
def test_what_keras_3_cannot_do_is_told(runner: Runner) -> None:
    code, _, err = end(runner.start("--workers", "2", str(SCRIPTS / "keras_fit.py")), LIMIT_S)
    assert code == 3
    assert re.search(
        r"ValueError: Attempt to convert a value \(PerReplica:\{ \.\.\. \}\) with an\s+unsupported type", err
    ), err
    assert "model.fit(" in err
    assert "hint  Keras 3's `fit` cannot do this" in err
