"""Commands that use a run: side by side, beside training, and where nothing may be written."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from supervised import wait_until
from tiny_job import MODULE, command, environment, kill_all, run_command, write_job

from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_lock import lock_run, owner_of

pytestmark = pytest.mark.slow
_SPLIT = ("--split", "train")
_EVALUATE = ("evaluate", *_SPLIT)
_MOUNT = ["unshare", "--map-root-user", "--mount"]


def test_side_by_side(tmp_path: Path) -> None:
    write_job(tmp_path)
    assert run_command("train", "job.yaml", "-q", cwd=tmp_path).code == 0
    words = ([*_EVALUATE], ["predict", *_SPLIT, "--output", "p.npz"], ["export", "--format", "keras"], [*_EVALUATE])
    started = [
        subprocess.Popen([*command(), *each, "runs/job"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
        for each in words
    ]
    try:
        for process in started:
            assert process.communicate(timeout=120)[1] == b""
            assert process.returncode == 0
    finally:
        for process in started:
            kill_all(process.pid)
    report = json.loads(run_command("report", "runs/job", "--json", cwd=tmp_path).out)
    assert [attempt["status"] for attempt in report["attempts"]] == ["done"] * 5
    assert len(report["evaluations"]) == 2
    assert report["evaluations"][0] == report["evaluations"][1]
    assert report["exports"].keys() == {"keras"}


def test_beside_training(tmp_path: Path) -> None:
    write_job(tmp_path, train={"epochs": 1_000_000}, checkpoint={"every_steps": 20, "keep": 1})
    run = RunDir(tmp_path / "runs" / "job")
    training = subprocess.Popen([*command(), "train", "job.yaml", "-q"], cwd=tmp_path, env=environment())
    try:
        wait_until(lambda: bool(run.checkpoint_steps()), timeout_s=60)
        done = run_command(*_EVALUATE, "runs/job", cwd=tmp_path)
        assert done.code == 0, done.text
        assert training.poll() is None
        assert run_command("stop", "runs/job", cwd=tmp_path).code == 0
        assert training.wait(timeout=60) == 4
    finally:
        kill_all(training.pid)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


_WAITS = "def data():\n    import os, time\n    while not os.path.exists('go'):\n        time.sleep(0.01)\n"


def test_the_exports_of_training_exclude_others(tmp_path: Path) -> None:
    write_job(tmp_path, MODULE.replace("def data():\n", _WAITS), export=["weights", "keras"])
    run = RunDir(tmp_path / "runs" / "job")
    words = [*command(), "train", "job.yaml", "-q"]
    training = subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(run.has_config, timeout_s=60)
        with lock_run(run.export_lock("weights")):
            (tmp_path / "go").touch()
            wait_until(lambda: "which is writing the run's export as weights" in read(run.events), timeout_s=60)
            refused = run_command("export", "--format", "keras", "runs/job", cwd=tmp_path)
            assert refused.code == 75
            owner = owner_of(run.export_lock("keras"))
            assert owner is not None
            assert f"runs/job: process {owner.pid} is writing its export as keras" in refused.err
            assert not run.export.exists()
        assert training.communicate(timeout=60)[1] == ""
        assert training.returncode == 0
    finally:
        kill_all(training.pid)
    assert {path.name for path in run.export.iterdir()} == {"model.keras", "model.weights.h5"}
    assert all(owner_of(run.export_lock(kind)) is None for kind in ("keras", "weights"))


@pytest.mark.skipif(shutil.which(_MOUNT[0]) is None, reason="needs unshare")
def test_a_disk_that_may_only_be_read(tmp_path: Path) -> None:
    write_job(tmp_path)
    assert run_command("train", "job.yaml", "-q", cwd=tmp_path).code == 0
    expected = json.loads(run_command(*_EVALUATE, "runs/job", "--json", cwd=tmp_path).out.splitlines()[-2])
    before = sorted(str(path) for path in (tmp_path / "runs").rglob("*"))
    mounted = "mount --bind runs runs && mount -o remount,ro,bind runs runs && exec "
    start = [*_MOUNT, "sh", "-c", mounted + '"$@"', "sh", *command()]
    done = run_command(*_EVALUATE, "runs/job", "--json", cwd=tmp_path, start=start)
    assert done.code == 0, done.text
    assert "runs/job is read-only: nothing is recorded there" in done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    assert found[0]["run"] == str(tmp_path / "runs" / "job")
    assert found[-2]["logs"] == expected["logs"]
    assert run_command("predict", *_SPLIT, "runs/job", cwd=tmp_path, start=start).code == 0
    assert (tmp_path / "predictions-train.npz").exists()
    nowhere = [*_MOUNT, "sh", "-c", mounted.replace("exec ", "") + 'cd runs && "$@"', "sh", *command()]
    refused = run_command("predict", *_SPLIT, "job", cwd=tmp_path, start=nowhere)
    assert refused.code == 2
    assert "current directory are read-only; add --output FILE" in refused.err
    refused = run_command("export", "runs/job", cwd=tmp_path, start=start)
    assert refused.code == 2
    assert sorted(str(path) for path in (tmp_path / "runs").rglob("*")) == before
