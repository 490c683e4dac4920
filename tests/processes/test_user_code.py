"""Tests of user modules that parse arguments, take signals or disable eager execution, and of missing JAX devices."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from supervised import wait_until
from tiny_job import LOSSES, MODULE, command, environment, kill_all, losses, run_command, write_job

from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import CheckpointSaved, StepsDone
from distlaunch.base.run_dir import RunDir

ARGUMENTS = """
import argparse, sys
from absl import flags
assert len(sys.argv) == 1 and sys.argv[0].endswith("mine.py"), sys.argv
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
ARGUMENTS = parser.parse_args()
flags.DEFINE_float("rate", 0.1, "rate")
flags.FLAGS(sys.argv)
"""
READ_BY_OTHERS = """
class Examples:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x, y = _arrays()
        return x[index], y[index]


_arrays = data


def data():
    return Examples()
"""


@pytest.mark.slow
def test_a_module_that_parses_its_arguments(tmp_path: Path) -> None:
    write_job(tmp_path, ARGUMENTS + MODULE)
    done = run_command("train", "job.yaml", cwd=tmp_path)
    assert done.code == 0, done.text
    assert losses(tmp_path) == LOSSES


@pytest.mark.slow
def test_in_other_processes_too(tmp_path: Path) -> None:
    """Readers, two workers, the check of exports, and what `plan` builds."""
    write_job(tmp_path, ARGUMENTS + MODULE + READ_BY_OTHERS, strategy={"kind": "multi_worker_mirrored"},
              cluster={"workers": 2}, export=["keras", "weights"],
              data={"function": "mine.py:data", "global_batch": 16, "shuffle": False, "processes": 2})  # fmt: skip
    done = run_command("train", "job.yaml", cwd=tmp_path)
    assert done.code == 0, done.text
    assert losses(tmp_path) == LOSSES
    done = run_command("plan", "job.yaml", "--variables", "--data", cwd=tmp_path)
    assert done.code == 0, done.text


@pytest.mark.parametrize(
    "line",
    [
        "signal.signal(signal.SIGTERM, lambda *_: None); signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        pytest.param("signal.signal(signal.SIGTERM, signal.SIG_IGN)", marks=pytest.mark.slow),
        pytest.param("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})", marks=pytest.mark.slow),
    ],
    ids=["handled", "ignored", "blocked"],
)
@pytest.mark.parametrize("place", ["import", pytest.param("function", marks=pytest.mark.slow)])
def test_a_stop_where_the_signal_was_taken(tmp_path: Path, line: str, place: str) -> None:
    at_import = f"import signal\n{line if place == 'import' else ''}\n"
    module = MODULE if place == "import" else MODULE.replace("    layers =", f"    {line}\n    layers =")
    job = write_job(tmp_path, at_import + module, train={"epochs": 10_000_000, "log_every_steps": 1})
    run = RunDir(tmp_path / "runs" / "job")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(
        [*command(), "train", str(job)], cwd=tmp_path, env=environment(), text=True, **pipes
    ) as process:
        try:
            wait_until(lambda: read_events_of(run.events, StepsDone) or process.poll() is not None, timeout_s=60)
            process.terminate()
            out, _ = process.communicate(timeout=20)
        finally:
            kill_all(process.pid)
    assert process.returncode == 4, out
    assert "killed" not in out
    assert read_events_of(run.events, CheckpointSaved)


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, marks=pytest.mark.slow) for call in ("disable_eager_execution()", "disable_v2_behavior()")],
)
@pytest.mark.parametrize("place", ["importing", pytest.param("calling", marks=pytest.mark.slow)])
def test_eager_execution_that_is_switched_off(tmp_path: Path, call: str, place: str) -> None:
    line = f"import tensorflow as tf; tf.compat.v1.{call}"
    module = (
        f"{line}\n{MODULE}" if place == "importing" else MODULE.replace("    layers =", f"    {line}\n    layers =")
    )
    write_job(tmp_path, module)
    done = run_command("train", "job.yaml", cwd=tmp_path)
    assert done.code == 2
    assert "job.yaml:" in done.err
    assert f"{place} " in done.err
    assert "has switched off eager execution of TensorFlow, which Keras 3 needs; remove" in done.err
    assert "Traceback" not in done.text


@pytest.mark.parametrize(
    ("name", "value"), [("JAX_PLATFORMS", "cuda"), pytest.param("JAX_PLATFORMS", "no", marks=pytest.mark.slow)]
)
def test_devices_that_jax_does_not_have(tmp_path: Path, name: str, value: str) -> None:
    write_job(tmp_path, strategy={"kind": "jax", "mesh": {"batch": 1}})
    done = run_command("train", "job.yaml", cwd=tmp_path, env={name: value, "CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 3
    assert f"{name}={value}: JAX cannot use such a device here" in done.err
    assert f"unset it, or set {name}=cpu" in done.err
    assert "Traceback" not in done.text
    assert "File " not in done.text


@pytest.mark.slow
@pytest.mark.parametrize("value", ["cuda", "no"])
def test_a_job_that_does_not_use_jax_ignores_its_variables(tmp_path: Path, value: str) -> None:
    write_job(tmp_path)
    assert run_command("train", "job.yaml", cwd=tmp_path, env={"JAX_PLATFORMS": value}).code == 0
    assert losses(tmp_path) == LOSSES
