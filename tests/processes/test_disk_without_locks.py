"""A run on a disk as some clusters have it: it refuses locks, and files in memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from real import at_step, finish, run, start, wait_for

from distlaunch.base.event_files import read_events
from distlaunch.base.events import RunEnded, StepsDone
from distlaunch.base.liveness import read_liveness
from distlaunch.base.run_dir import RunDir

DISK = """
import errno, fcntl, mmap, os


def refuse(fd, operation):
    raise OSError(errno.ENOSYS, "Function not implemented")


class Refusing(mmap.mmap):
    def __new__(cls, fileno, *words, **options):
        if fileno >= 0 and os.readlink(f"/proc/self/fd/{fileno}").startswith(os.environ["DISK"]):
            raise OSError(errno.ENODEV, "No such device")
        return super().__new__(cls, fileno, *words, **options)


fcntl.flock, mmap.mmap = refuse, Refusing
"""
MINE = """
import keras, numpy as np


def model():
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])


def data():
    x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
    return {"train": (x, x.sum(1, keepdims=True))}
"""
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 32}
compile: {optimizer: sgd, loss: mse}
train: {epochs: 100000, log_every_steps: 1}
strategy: {kind: mirrored, replicas: 2}
"""


@pytest.mark.slow  # in CI tests/unit/test_run_lock.py and test_heartbeats.py have its parts
def test_a_run_has_one_launcher_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DISK", str(tmp_path))
    site = tmp_path / "site"
    for path, text in ((site / "sitecustomize.py", DISK), (tmp_path / "mine.py", MINE), (tmp_path / "c.yaml", CONFIG)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    job, words = RunDir(tmp_path / "runs" / "job"), ("train", "runs/job", "--resume")

    first = start("train", "c.yaml", cwd=tmp_path, path=[site])
    wait_for(job, at_step(20))
    liveness = read_liveness(job.task(0, "worker:0").heartbeat)
    assert liveness.beats
    assert liveness.step
    code, out, err = run(*words, cwd=tmp_path, path=[site])
    assert code == 2, out + err
    assert f"runs/job: this run is still running (process {first.pid})" in err
    os.kill(first.pid, signal.SIGKILL)
    finish(first)

    second = start(*words, cwd=tmp_path, path=[site])
    before = max(event.step for event in read_events(job.events) if isinstance(event, StepsDone))
    wait_for(job, at_step(before + 20))
    code, out, err = run("stop", "runs/job", cwd=tmp_path, path=[site])
    assert code == 0, out + err
    code, out, err = finish(second)
    assert code == 4, out + err
    assert [event.status for event in read_events(job.events) if isinstance(event, RunEnded)][-1] == "stopped"
    code, out, err = run(*words, "--set", "train.epochs=1", cwd=tmp_path, path=[site])
    assert code == 0, out + err
