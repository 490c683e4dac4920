"""A machine that is taken away tells one task, or the launcher: all agree on a step, and the run goes on from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import portpicker
import psutil
import pytest
from real import finish, run, start
from supervised import processes_of, wait_until

from distlaunch.base.event_files import read_events
from distlaunch.base.events import Event, Restored, RunEnded, StepsDone, TaskStarted
from distlaunch.base.run_dir import RunDir

MINE = """
import atexit, os
import keras, numpy as np

atexit.register(lambda: open(f"hook-{os.getpid()}", "x"))

def model():
    return keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(16), keras.layers.Dense(1)])


def data():
    x = np.random.default_rng(0).normal(size=(960, 10)).astype("float32")
    return {"train": (x, x.sum(1, keepdims=True))}
"""
CONFIG = """
name: job
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 32}
compile: {optimizer: sgd, loss: mse}
train: {epochs: 2, log_every_steps: 1, steps_per_call: 1}
strategy: {kind: multi_worker_mirrored}
cluster: {workers: 2}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def events_of(job: RunDir, task: str) -> list[Event]:
    files = [job.events, *(files.events for files in job.tasks(0).values())] if job.attempts() else []
    return [event for path in files if path.exists() for event in read_events(path) if event.task == task]


def pid_of(job: RunDir, task: str) -> int:
    return next(event.pid for event in events_of(job, task) if isinstance(event, TaskStarted))


def test_one_task_is_told_and_all_stop_at_one_step(project: Path) -> None:
    job = RunDir(project / "runs" / "job")
    process = start("train", "mine.yaml", "--set", "train.epochs=4000", cwd=project)
    wait_until(lambda: any(isinstance(event, StepsDone) for event in events_of(job, "worker:0")), timeout_s=120)
    os.kill(pid_of(job, "worker:1"), signal.SIGUSR1)
    code, out, err = finish(process)
    assert code == 4, out + err
    assert {f"hook-{pid_of(job, task)}" for task in ("worker:0", "worker:1")} <= set(os.listdir(project))
    done = [event.step for event in events_of(job, "worker:0") if isinstance(event, StepsDone)][-1]

    assert run("train", "runs/job", "--resume", "--set", f"train.epochs={done // 30 + 2}", cwd=project)[0] == 0
    assert [event.step for event in read_events(job.events) if isinstance(event, Restored)] == [done]


@pytest.mark.slow  # in CI, below, a launcher starts both tasks
def test_each_launcher_of_a_cluster_by_hand_says_that_it_was_stopped(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with its command again and --resume, each goes on."""

    def start_all(*words: str) -> list[subprocess.Popen[str]]:
        addresses = [f"localhost:{portpicker.pick_unused_port()}" for _ in range(2)]
        launchers = []
        for index in range(2):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            monkeypatch.setenv("TF_CONFIG", json.dumps(task))
            launchers.append(start("train", "mine.yaml", *words, cwd=project))
        return launchers

    launchers = start_all("--set", "train.epochs=4000")
    jobs = [RunDir(project / "runs" / name) for name in ("job", "job-worker-1")]
    wait_until(lambda: any(isinstance(event, StepsDone) for event in events_of(jobs[0], "worker:0")), timeout_s=120)
    launchers[0].send_signal(signal.SIGTERM)  # the other hears of it from its task alone
    ends = [finish(process) for process in launchers]
    assert [code for code, _, _ in ends] == [4, 4], ends
    steps = [event.step for event in events_of(jobs[0], "worker:0") if isinstance(event, StepsDone)]

    again = [finish(each) for each in start_all("--resume", "--set", f"train.epochs={steps[-1] // 30 + 2}")]
    assert [code for code, _, _ in again] == [0, 0], again
    assert [event.step for event in read_events(jobs[0].events) if isinstance(event, Restored)] == [steps[-1]]
    assert sorted(path.name for path in (project / "runs").iterdir()) == ["job", "job-worker-1"]
    ends = [read_events(job.events)[-1] for job in jobs]
    assert [event.status for event in ends if isinstance(event, RunEnded)] == ["done", "done"]


HELPED = """
import subprocess

import tensorflow as tf


def rows():
    decoder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    while True:
        decoder.stdin.write(b"1\\n")
        decoder.stdin.flush()
        yield [float(decoder.stdout.readline())] * 10, [1.0]


def data():
    shapes = (tf.TensorSpec((10,)), tf.TensorSpec((1,)))
    return {"train": tf.data.Dataset.from_generator(rows, output_signature=shapes)}
"""


def test_what_a_task_has_started_lives_until_the_checkpoint_is_written(project: Path) -> None:
    (project / "helped.py").write_text(HELPED)
    words = ["strategy.kind=one_device", "cluster.workers=1", "data.function=helped.py:data"]
    words += ["data.shuffle=false", "train.epochs=1", "train.steps_per_epoch=1000000"]
    job = RunDir(project / "runs" / "job")
    process = start("train", "mine.yaml", *(word for text in words for word in ("--set", text)), cwd=project)
    wait_until(lambda: any(isinstance(event, StepsDone) for event in events_of(job, "worker:0")), timeout_s=120)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 4, out + err
    assert list(job.checkpoints.iterdir())
    wait_until(lambda: not processes_of(project), timeout_s=10)


KEEPS = (Path(__file__).parent / "user_code" / "preemption.py").read_text()


def test_what_is_being_written_when_a_peer_is_lost_is_written_whole(project: Path) -> None:
    (project / "keeps.py").write_text(KEEPS)
    words = ['train.callbacks=[{name: "keeps.py:Keeps", tasks: chief}]', "restarts.max=1"]
    code, out, err = run("train", "mine.yaml", *(word for text in words for word in ("--set", text)), cwd=project)
    assert code == 0, out + err
    assert "worker:1 failed; stopping worker:0" in out
    assert "restart 1 of 1" in out
    assert (project / "kept").read_text() == "all of it"


@pytest.mark.slow
def test_told_before_there_is_anything_to_save(project: Path) -> None:
    job = RunDir(project / "runs" / "job")
    process = start("train", "mine.yaml", cwd=project)
    wait_until(lambda: (job.task(0, "worker:1").heartbeat).exists(), timeout_s=60)  # it runs, and loads TensorFlow
    worker = next(p for p in psutil.Process(process.pid).children(recursive=True) if "worker:1" in p.cmdline())
    worker.terminate()
    code, out, err = finish(process)
    assert code == 4, out + err
    assert not job.checkpoints.exists()
    wait_until(lambda: not processes_of(project), timeout_s=10)
