"""Somebody on the network who should not be there: he learns nothing, and the job goes on with the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from slurm import wait_until
from test_training import HOSTS, losses, write_config

from distlaunch.base.run_dir import RunDir

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
EPOCHS = 20_000


@pytest.mark.parametrize(
    ("strategy", "cluster"),
    [
        ({"kind": "multi_worker_mirrored"}, {"workers": 3}),
        ({"kind": "jax", "mesh": {"batch": 3}}, {"workers": 3}),
        ({"kind": "dtensor", "mesh": {"batch": 3}}, {"workers": 3}),
        ({"kind": "parameter_server"}, {"workers": 1, "ps": 1}),
    ],
    ids=lambda given: given.get("kind", ""),
)
def test_a_port_scan_and_random_messages_change_nothing(
    lab: Lab, own_disk: Path, tmp_path: Path, strategy: dict[str, Any], cluster: dict[str, Any]
) -> None:
    name = strategy["kind"]
    engine = {"kind": "ssh", "hosts": HOSTS}
    config = write_config(
        tmp_path, own_disk, name, strategy=strategy, cluster=cluster, engine=engine, train={"epochs": EPOCHS}
    )
    job = lab.start("train", config)
    job.wait_for(f"/{EPOCHS}")
    run = RunDir(own_disk / name)
    stranger = str(Path(__file__).with_name("stranger.py"))
    told = []
    for number in (1, 2):
        there = lab.run(0, [sys.executable, stranger, lab.address(number), "5000", str(4 << 30)])
        assert there.end(200) == 0, there.output
        told.append(there.output)
    assert any(line.split()[1:] for line in told[0].splitlines() if line.startswith("open:")), told
    disturbed = len(losses(run))
    wait_until(lambda: len(losses(run)) > disturbed + 2)
    compared = min(disturbed, 100)
    lab.launcher(job).terminate()
    assert job.end(60) == 4, job.output
    assert "Traceback" not in job.output
    alone = ("--name", f"{name}-alone", "--set", "engine.kind=local", "--set", f"train.epochs={compared}")
    local = lab.start("train", config, *alone)
    assert local.end(300) == 0, local.output
    assert losses(run)[:compared] == pytest.approx(losses(RunDir(own_disk / f"{name}-alone")), rel=1e-5)
