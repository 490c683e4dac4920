"""Jobs through agents, with a program in place of `ssh` that runs commands here. Real hosts: `tests/cluster`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from distlaunch.base.run_dir import RunDir

_SSH = """#!/bin/sh
echo "$@" >> {calls}
for word; do last=$word; done
exec sh -c "$last"
"""
_ENTRY = "from distlaunch.cli.main import main; main()"


def _config(folder: Path, **engine: Any) -> Path:
    path = folder / "tiny.yaml"
    config = {
        "runs_dir": str(folder / "runs"),
        "model": {"function": "distlaunch.workloads.images:mlp"},
        "data": {"function": "distlaunch.workloads.images:fashion_mnist", "global_batch": 32, "train_examples": 64},
        "compile": {"loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}},
        "train": {"epochs": 1},
        "validation": None,
        "cluster": {"workers": 2},
        "strategy": {"kind": "multi_worker_mirrored"},
        "engine": {"kind": "ssh", **engine},
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(_SSH.format(calls=tmp_path / "calls"))
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TF_SECRET_OF_MINE": "hidden-from-ps"}


def _run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run([sys.executable, "-c", _ENTRY, *words], env=environ, capture_output=True, text=True)
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    agents = [process for process in left if "distlaunch.agent.remote" in (process.info["cmdline"] or [])]
    assert not psutil.wait_procs(agents, 10)[1]
    return done


def test_two_hosts_train_and_one_is_a_spare(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "hosts.txt").write_text("first  # the chief's\nme@second:2222\nthird slots=2\n")
    done = _run(environ, "train", str(_config(tmp_path, hostfile="hosts.txt")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no task runs on third; a restart may use it" in done.stdout
    run = RunDir(tmp_path / "runs" / "tiny")
    assert run.checkpoint_steps() == [2]
    assert len(run.tasks(0)) == 2
    assert '"engine": "ssh"' in run.plan.read_text()
    calls = (tmp_path / "calls").read_text()
    assert "-p 2222 -l me -- second exec" in calls
    assert calls.count("BatchMode=yes") == 3
    # what tasks get of the environment is on no command line
    assert "hidden-from-ps" not in calls + run.plan.read_text()


def test_too_few_slots_start_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    done = _run(environ, "train", str(_config(tmp_path, hosts=["only"])))
    assert done.returncode == 2
    assert "cluster.workers: got 2, but the hosts have 1 slot(s) (only: 1)" in done.stderr
    assert not (tmp_path / "runs" / "tiny").exists()


def test_ssh_that_is_missing_is_told(tmp_path: Path, environ: dict[str, str]) -> None:
    done = _run({**environ, "PATH": "/nowhere"}, "train", str(_config(tmp_path, hosts=["a", "b"])))
    assert done.returncode == 2
    assert "engine.kind: ssh needs the program `ssh`, which is not on PATH" in done.stderr
