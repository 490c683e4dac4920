"""Jobs in a real Slurm allocation."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from lab import Lab
from slurm import Slurm, wait_until
from test_training import losses, planned_hosts, write_config

from distlaunch.base.run_dir import RunDir

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
AUTO = {"kind": "auto"}


@pytest.mark.short
def test_a_command_that_srun_starts_twice_trains_once(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "runs", "once", engine=AUTO, cluster={"workers": 2})
    job = slurm.run("srun", "-N2", "-l", *slurm.train(config))
    assert job.end(180) == 0, job.output
    assert job.output.count("task 0 of the step does the work, so this task exits") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["once"]
    run = RunDir(tmp_path / "runs" / "once")
    assert len(run.tasks(0)) == 2
    local = lab.start("train", config, "--name", "local", "--set", "engine.kind=local")
    assert local.end(180) == 0, local.output
    assert losses(run) == pytest.approx(losses(RunDir(tmp_path / "runs" / "local")), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("-N2 --ntasks-per-node=1 --gpus=4", [2, 2]),
        ("-N2 --ntasks-per-node=1 --gpus=3", [1, 2]),
        ("-N2 --ntasks-per-node=2 --gpus-per-task=1", [2, 2, 2, 2]),
        ("-N2 --exclusive", [2, 2]),
    ],
)
def test_agents_get_all_gpus_of_their_nodes(
    lab: Lab, slurm: Slurm, tmp_path: Path, options: str, gpus: list[int]
) -> None:
    script, out, program = tmp_path / "job.sh", tmp_path / "job.out", tmp_path / "gpus.py"
    program.write_text("import os; print('GPUs:', os.environ['SLURM_GPUS_ON_NODE'])")
    words = [*slurm.train()[:-1], "run", "--workers", str(len(gpus)), str(program)]
    script.write_text(f"#!/bin/bash\nexec {shlex.join(words)}\n")
    job = slurm.run("sbatch", "--wait", *options.split(), f"--chdir={tmp_path}", f"--output={out}", str(script))
    code = job.end(100)
    assert code == 0, out.read_text()
    assert sorted(int(line.split("GPUs: ")[1]) for line in out.read_text().splitlines() if "GPUs: " in line) == gpus


@pytest.mark.parametrize("kind", ["jax", "dtensor"])
def test_three_nodes_give_the_losses_of_one_machine(lab: Lab, slurm: Slurm, tmp_path: Path, kind: str) -> None:
    strategy = {"kind": kind, "mesh": {"batch": 3}}
    config = write_config(tmp_path, tmp_path / "runs", "mesh", engine=AUTO, strategy=strategy)
    job = slurm.run("srun", "-N3", *slurm.train(config))
    assert job.end(200) == 0, job.output
    run = RunDir(tmp_path / "runs" / "mesh")
    assert list(planned_hosts(run).values()) == ["host1", "host2", "host3"]
    local = lab.start("train", config, "--name", "local", "--set", "engine.kind=local")
    assert local.end(200) == 0, local.output
    assert losses(run) == pytest.approx(losses(RunDir(tmp_path / "runs" / "local")), rel=1e-6)


def test_a_cancelled_job_leaves_a_checkpoint_and_nothing_else(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tmp_path / "runs", "batch", engine=AUTO, cluster={"workers": 2}, train={"epochs": 2000}
    )
    script, out = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text(f"#!/bin/bash\nexec {shlex.join(slurm.train(config))}\n")
    waiting = slurm.run("sbatch", "--wait", "--parsable", "-N2", "-o", str(out), str(script))
    waiting.wait_for("\n")
    number = waiting.output.strip()
    run = RunDir(tmp_path / "runs" / "batch")
    wait_until(lambda: losses(run))
    assert slurm.run("scancel", number).end(20) == 0
    waiting.end(60)
    assert run.checkpoint_steps()
    assert "--resume" in out.read_text()
