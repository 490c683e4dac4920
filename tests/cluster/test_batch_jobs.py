"""Batch jobs that `distlaunch submit` hands to a real Slurm, from the login host to their end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from slurm import Slurm, wait_until
from test_training import losses, write_config

from distlaunch.base.run_dir import RunDir
from tests.documents import snippets

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
AUTO = {"kind": "auto"}


def submit(slurm: Slurm, folder: Path, name: str, *words: str, **changes: Any) -> RunDir:
    """Submits a run without waiting for it."""
    config = write_config(folder, folder / "runs", name, **{"engine": AUTO, "cluster": {"workers": 2}, **changes})
    job = slurm.distlaunch("submit", "--engine", "slurm", config, *words)
    assert job.end(60) == 0, job.output
    run = RunDir(folder / "runs" / name)
    assert str(run.path) in job.output
    return run


def status(slurm: Slurm, run: RunDir) -> str:
    listing = slurm.distlaunch("runs", str(run.path.parent), "--json")
    assert listing.end(60) == 0, listing.output
    return next(each["status"] for each in json.loads(listing.output) if each["run"] == str(run.path))


def weights(run: RunDir) -> bytes:
    """The state of the last checkpoint."""
    return (run.checkpoints / f"step-{run.checkpoint_steps()[-1]:08d}" / "state.safetensors").read_bytes()


def job_of(run: RunDir) -> str:
    submission = run.submission()
    assert submission is not None
    return submission.job


@pytest.fixture(autouse=True)
def _queue_is_empty(lab: Lab, slurm: Slurm) -> Any:
    # before `lab` looks at what is left
    yield
    slurm.run("scancel", "--user=root", "--signal=KILL", "--full").end(20)
    slurm.run("scancel", "--user=root").end(20)


def test_a_submitted_job_is_followed_to_its_end(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tmp_path / "my runs", "a", engine={"kind": "slurm", "setup": ["export A=1"]}, cluster={"workers": 2}
    )
    job = slurm.distlaunch("submit", "--engine", "slurm", config, "--wait")
    assert job.end(240) == 0, job.output
    assert "epoch 2/2" in job.output
    run = RunDir(tmp_path / "my runs" / "a")
    assert run.job_exit_code() == 0
    assert "status      done" in run.launcher_log.read_text()
    assert status(slurm, run) == "done"
    local = lab.start("train", config, "--name", "local", "--set", "engine.kind=local")
    assert local.end(180) == 0, local.output
    assert losses(run) == pytest.approx(losses(RunDir(tmp_path / "my runs" / "local")), rel=1e-6)


def test_a_preempted_job_resumes_to_the_same_bits(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    """Once by the signal of a time limit, once by a job that is more urgent."""
    settings: dict[str, Any] = {"train": {"epochs": 120}, "determinism": True}
    run = submit(slurm, tmp_path, "preempted", "--requeues", "2", **settings)
    follower = slurm.distlaunch("logs", "-f", str(run.path))
    wait_until(lambda: len(losses(run)) >= 2, 120)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job_of(run)).end(20) == 0
    wait_until(lambda: len(run.attempts()) == 2, 120)
    begun = len(losses(run))
    wait_until(lambda: len(losses(run)) > begun, 120)
    urgent = slurm.run("srun", "-N3", "--exclusive", "-p", "urgent", "true")
    wait_until(lambda: len(run.attempts()) == 3, 120)
    assert urgent.end(120) == 0, urgent.output
    assert follower.end(240) == 0, follower.output
    assert "attempt 2" in follower.output
    assert run.job_exit_code() == 0
    assert len(losses(run)) == 120
    config = str(tmp_path / "preempted.yaml")
    whole = slurm.distlaunch("submit", "--engine", "slurm", config, "--name", "whole", "--wait")
    assert whole.end(240) == 0, whole.output
    assert weights(run) == weights(RunDir(tmp_path / "runs" / "whole"))


def test_requeues_are_counted(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    run = submit(slurm, tmp_path, "counted", "--requeues", "0", train={"epochs": 5000})
    wait_until(lambda: losses(run), 120)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job_of(run)).end(20) == 0
    wait_until(lambda: run.job_exit_code() == 4)
    assert status(slurm, run) == "stopped"


@pytest.mark.short
def test_stop_from_the_login_host(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    run = submit(slurm, tmp_path, "running", train={"epochs": 5000})
    name = 'a "job" #1 $(id) \\ %j'
    waiting = submit(slurm, tmp_path, "waiting", "--set", "engine.flags=[--hold]", "-J", name)
    assert status(slurm, waiting) == "pending"
    listed = slurm.run("squeue", "--noheader", f"--jobs={job_of(waiting)}", "--format=%j")
    assert listed.end(20) == 0
    assert listed.output.strip() == name
    again = slurm.distlaunch("submit", "--engine", "slurm", str(waiting.path), "--resume")
    assert again.end(60) == 2
    assert "is already in the queue" in again.said
    cancelled = slurm.distlaunch("stop", str(waiting.path))
    assert cancelled.end(60) == 0, cancelled.output
    assert "cancelled before the first step" in cancelled.said
    assert status(slurm, waiting) == "cancelled"
    wait_until(lambda: losses(run), 120)
    assert status(slurm, run) == "running"
    stopped = slurm.distlaunch("stop", str(run.path))
    assert stopped.end(120) == 0, stopped.output
    assert "stopped at step" in stopped.said
    assert run.job_exit_code() == 4
    # it has not been queued again; what is left is done by another job
    assert status(slurm, run) == "stopped"
    words = ["--resume", "--wait", "--set", f"train.epochs={len(losses(run)) + 1}"]
    rest = slurm.distlaunch("submit", "--engine", "slurm", str(run.path), *words)
    assert rest.end(240) == 0, rest.output
    assert "restored" in rest.said


def test_stop_now_and_ctrl_c_while_waiting(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tmp_path / "runs", "now", engine=AUTO, cluster={"workers": 2}, train={"epochs": 5000}
    )
    job = slurm.distlaunch("submit", "--engine", "slurm", config, "--wait")
    job.wait_for("epoch    2/5000", 120)
    lab.launcher(job).send_signal(signal.SIGINT)
    assert job.end(30) == 130, job.output
    run = RunDir(tmp_path / "runs" / "now")
    assert f"job {job_of(run)} continues" in job.said
    assert f"stop it distlaunch stop {run.path}" in job.said
    assert status(slurm, run) == "running"
    assert slurm.distlaunch("stop", "--now", str(run.path)).end(120) == 0
    assert run.job_exit_code() == 4
    # Slurm may still complete the job
    wait_until(lambda: status(slurm, run) == "interrupted", 60)


def test_what_slurm_refuses_is_told_and_leaves_nothing(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "runs", "refused", engine=AUTO, cluster={"workers": 2})
    job = slurm.distlaunch("submit", "--engine", "slurm", config, "-p", "nowhere")
    assert job.end(60) == 2
    assert "invalid partition specified: nowhere" in job.said
    assert "Traceback" not in job.output
    assert not list((tmp_path / "runs").iterdir())


def test_nodes_that_do_not_see_the_run_are_told_of(lab: Lab, slurm: Slurm, tmp_path: Path, own_disk: Path) -> None:
    config = write_config(tmp_path, own_disk, "unseen", engine=AUTO, cluster={"workers": 2})
    job = slurm.distlaunch("submit", "--engine", "slurm", config, "--wait")
    assert job.end(120) == 75  # nothing that this host can see says why it has ended
    assert "is that on a disk that its nodes share?" in job.said
    assert status(slurm, RunDir(own_disk / "unseen")) == "failed"


def test_a_failure_is_not_repeated(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    settings = {"kind": "slurm", "setup": ["true", "cat /nowhere/at/all"]}
    config = write_config(tmp_path, tmp_path / "runs", "setup", engine=settings, cluster={"workers": 2})
    job = slurm.distlaunch("submit", "--engine", "slurm", config, "--wait")
    assert job.end(120) == 2
    assert "this line of engine.setup failed: cat /nowhere/at/all" in job.said


def test_a_cause_outside_the_job_queues_it_again_a_minute_later(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    run = submit(slurm, tmp_path, "killed", "--requeues", "1", train={"epochs": 5000})

    def kill() -> float:
        """Kill a task once it has trained; returns when."""
        before = len(losses(run))
        wait_until(lambda: len(losses(run)) > before + 1, 120)
        lab.task(1, "worker:0").kill()
        return time.monotonic()

    killed = kill()
    wait_until(lambda: status(slurm, run) == "pending", 60)
    assert run.job_exit_code() is None
    # in the queue, or where Slurm starts it earlier, on its node
    wait_until(lambda: len(run.attempts()) == 2, 180)
    assert time.monotonic() - killed > 59
    kill()
    # the one requeue is used up
    wait_until(lambda: run.job_exit_code() == 75, 60)
    assert status(slurm, run) == "failed"


def test_the_array_of_the_documents(lab: Lab, slurm: Slurm, tmp_path: Path) -> None:
    """The job array of automation.md trains one run per job; a job near its time limit is requeued and resumes."""
    settings: dict[str, Any] = {
        "engine": AUTO,
        "train": {"epochs": 300},
        "strategy": {"kind": "one_device"},
        "cluster": {},
    }
    write_config(tmp_path, tmp_path / "runs", "mine", **settings)
    (text,) = [one.text for one in snippets() if one.document == "automation.md" and "#SBATCH" in one.text]
    (tmp_path / "array.sh").write_text(text)
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    submitted = slurm.run(
        "sbatch", "--parsable", "--time=30", f"--chdir={tmp_path}", f"--export=ALL,{path}", f"{tmp_path}/array.sh"
    )
    assert submitted.end(20) == 0, submitted.output
    number = submitted.output.strip()
    runs = [RunDir(tmp_path / "runs" / f"rate-{rate}") for rate in ("0.1", "0.03", "0.01")]
    wait_until(lambda: losses(runs[1]), 120)
    assert slurm.run("scancel", "--batch", "--signal=USR1", f"{number}_1").end(20) == 0
    wait_until(lambda: len(runs[1].attempts()) == 2, 200)
    wait = slurm.distlaunch("wait", *(str(run.path) for run in runs))
    assert wait.end(300) == 0, wait.output
    assert [len(losses(run)) for run in runs] == [300] * 3
    assert [run.attempts() for run in runs] == [[0], [0, 1], [0]]
