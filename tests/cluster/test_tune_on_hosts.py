"""`distlaunch tune` on real hosts and in a real Slurm allocation: it measures there, and leaves nothing there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import COMMAND, Job, Lab
from slurm import Slurm, wait_until
from test_training import write_config

from distlaunch.base.run_files.trial_records import RoundResult
from distlaunch.config.read.load import load_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WORDS = ("--seconds", "10", "--only", "one_device", "--json")
"""At least one candidate is measured, whatever the budget."""


def result_of(job: Job) -> dict[str, Any]:
    """Return the result that a command prints after its messages."""
    assert job.end(240) == 0, job.output
    assert "Traceback" not in job.output
    return json.loads(job.output[job.output.index("{") : job.output.rindex("}") + 1])


def check(found: dict[str, Any]) -> None:
    """Check that two candidates were measured, whose losses are equal."""
    assert found["hosts"] == ["host1", "host2"]
    assert not found["interrupted"]
    rows = {row["candidate"]: row for row in found["rows"]}
    assert {"untuned", "one_device"} <= rows.keys()
    assert all(row["equal"] and len(row["rounds_ms"]) >= 2 for row in (rows["untuned"], rows["one_device"]))
    # two tasks on two hosts have more memory than one
    assert rows["untuned"]["memory_bytes"] > 1.5 * rows["one_device"]["memory_bytes"]


@pytest.mark.short
def test_hosts_with_disks_of_their_own(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    """The directories of the trials are on a disk that each host has for itself."""
    engine = {"kind": "ssh", "hosts": ["host1", "host2"]}
    config = write_config(tmp_path, own_disk, "tuned", engine=engine, cluster={"workers": 2})
    target = tmp_path / "winner.yaml"
    found = result_of(lab.run(0, [*COMMAND, "tune", config, *WORDS, "--write", str(target)], TMPDIR=str(own_disk)))
    check(found)
    for number in (1, 2):
        assert not lab.files(number, own_disk)
    assert not list(own_disk.iterdir())
    written = load_config(target, (), {}).config
    kind = "multi_worker_mirrored" if found["winner"] == "untuned" else "one_device"
    assert (written.strategy.kind, written.engine.kind) == (kind, "ssh")
    assert yaml.safe_load(target.read_text())["train"] == {"epochs": 2}, "the rest of the file stays"
    job = lab.start("train", str(target))
    assert job.end(180) == 0, job.output


def test_a_lost_host_ends_the_search_with_the_table_so_far(lab: Lab, own_disk: Path, tmp_path: Path) -> None:
    engine = {"kind": "ssh", "hosts": ["host1", "host2"], "host_timeout_s": 3}
    config = write_config(tmp_path, own_disk, "loses", engine=engine, cluster={"workers": 2})
    # both candidates use both hosts
    words = ("tune", config, "--seconds", "100", "--only", "oneDNN")
    job = lab.run(0, [*COMMAND, *words], TMPDIR=str(tmp_path))
    results = "distlaunch-tune-*/candidate/attempts/0/round-result.json"

    def num_measured() -> int:
        """Return the number of candidates that have been measured twice, after two rounds that do not count."""
        found = [RoundResult.read(path) for path in tmp_path.glob(results)]
        return sum(result is not None and result.number > 3 for result in found)

    wait_until(lambda: num_measured() == 2, 120)
    lab.kill(2)
    assert job.end(60) == 75, job.output
    assert "the search ended early: worker:1" in job.said
    assert "the host host2 was lost" in job.said
    assert "untuned (multi_worker_mirrored, 2 workers, 2 replicas)" in job.output
    assert "Traceback" not in job.output


@pytest.mark.short
def test_nodes_of_an_allocation(lab: Lab, slurm: Slurm, own_disk: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, own_disk, "nodes", engine={"kind": "slurm"}, cluster={"workers": 2})
    outside = slurm.distlaunch("tune", config)
    assert outside.end(60) == 2
    assert "start it with `sbatch` or `salloc`" in outside.output
    words = [*COMMAND, "tune", config, *WORDS]
    # started once on each node: one of them searches
    check(result_of(slurm.run("srun", "-N2", *words)))
