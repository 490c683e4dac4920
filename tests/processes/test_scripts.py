"""The scripts that people start from, as they are started: real workers, deadlines, nothing left at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import portpicker
import pytest
from supervised import REPOSITORY, wait_until

from distlaunch.base.errors import ExitCode
from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointSaved, EpochEnded, Restored, RunEnded, StepsDone, TaskStarted
from distlaunch.base.run_dir import RunDir

CONFIGS = Path(REPOSITORY) / "configs"
SCRIPTS = Path(REPOSITORY) / "scripts"
SHORT = ("--set", "data.train_examples=320", "--set", "data.validation_examples=64", "--set", "export=[]")
DEADLINE_S = 100


class Machine:
    """A directory to work in, with `distlaunch` on PATH as an installed package has it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        command = directory / "bin/distlaunch"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m distlaunch "$@"\n')
        command.chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "FORCE_COLOR")}
        self.env = {
            **inherited,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": REPOSITORY,
            "MARKER": str(directory),
            "COLUMNS": "400",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, *words: str | Path, **env: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(words, cwd=self.directory, env={**self.env, **env}, text=True, **pipes)

    def __call__(self, *words: str | Path, **env: str) -> tuple[int, str, str]:
        return end(self.start(*words, **env))

    def start_cluster(self, *options: str) -> list[subprocess.Popen[str]]:
        addresses = [f"127.0.0.1:{portpicker.pick_unused_port()}" for _ in range(2)]
        words = [*addresses, "--", str(CONFIGS / "fashion_mnist.yaml"), *SHORT, *options]
        return [self.start(SCRIPTS / "hand_started_cluster.sh", str(index), *words) for index in range(2)]

    def run(self, name: str) -> RunDir:
        return RunDir(self.directory / "runs" / name)


def end(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=deadline_s)
    return process.returncode, out, err


@pytest.fixture
def machine(run_dir: Path) -> Machine:
    return Machine(run_dir)


@pytest.mark.slow  # in CI test_preemption.py goes on with a cluster that was started by hand
def test_a_cluster_started_by_hand_and_gone_on_with(machine: Machine) -> None:
    chief, worker = machine.run("fashion-mnist"), machine.run("fashion-mnist-worker-1")
    for process in machine.start_cluster("--set", "train.epochs=1"):
        code, out, err = end(process)
        assert code == 0, out + err
    for path in (chief.config, chief.plan, chief.environment, chief.attempt_config(0), chief.checkpoints):
        assert path.exists()
    assert chief.finished()
    assert worker.finished()
    assert not worker.checkpoints.exists()

    for process in machine.start_cluster("--set", "train.epochs=3", "--resume"):
        code, out, err = end(process)
        assert code == 0, out + err
        assert "resuming runs/fashion-mnist" in out
    assert sorted(path.name for path in chief.path.parent.iterdir()) == ["fashion-mnist", "fashion-mnist-worker-1"]
    events = read_events(chief.events)
    epochs = [(event.attempt, event.epoch) for event in events if isinstance(event, EpochEnded)]
    assert epochs == [(0, 0), (1, 1), (1, 2)]
    assert [event.step for event in events if isinstance(event, Restored)] == [5]
    ends = [read_events(run.events)[-1] for run in (chief, worker)]
    assert [(event.status, event.step) for event in ends if isinstance(event, RunEnded)] == [("done", 15)] * 2


MIRRORED = ("--set", "strategy.kind=multi_worker_mirrored")
JAX = ("--set", "strategy.kind=jax", "--set", "strategy.mesh={batch: 2}")


# without the chief TensorFlow alone tells the other, after some 50 s
@pytest.mark.slow  # in CI test_preemption.py loses a peer of a cluster that was started by hand
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", [MIRRORED, JAX], ids=["mirrored", "jax"])
def test_a_machine_that_dies(machine: Machine, strategy: tuple[str, ...], victim: int) -> None:
    runs = machine.run("fashion-mnist"), machine.run("fashion-mnist-worker-1")
    launchers = machine.start_cluster("--set", "train.epochs=100000", *strategy)
    reports = runs[0].events, runs[1].task(0, "worker:1").events
    wait_until(lambda: any(isinstance(event, CheckpointSaved) for event in read_events(reports[0])), DEADLINE_S)
    wait_until(lambda: any(isinstance(event, StepsDone) for event in read_events(reports[1])), DEADLINE_S)
    pids = [event.pid for event in read_events(reports[victim]) if isinstance(event, TaskStarted)]
    os.kill(pids[0], signal.SIGKILL)
    told = [end(launcher, 180) for launcher in launchers]
    assert [code for code, _, _ in told] == [ExitCode.TEMPORARY, ExitCode.TEMPORARY], told
    assert re.search(r"^runs/\S+ failed at step [\d,]+: killed by SIGKILL", told[victim][2], re.MULTILINE)
    error = told[1 - victim][2]
    assert re.search(rf"^runs/\S+ failed( at step [\d,]+)?: worker:{victim} at 127\.0\.0\.1:", error, re.MULTILINE)
    assert f"a task of another launcher, is gone; worker:{1 - victim} noticed it: " in error
    assert "next  repeat the command on every machine with --resume" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected INDEX"),
        (["a:1", "--", "x.yaml"], "expected INDEX, a number from 0; received 'a:1'"),
        (["2", "a:1", "b:1", "--", "x.yaml"], "INDEX is 2, but there are 2 addresses"),
        (["0", "a", "--", "x.yaml"], "expected HOST:PORT; received 'a'"),
        (["0", "a:1", "x.yaml"], "expected HOST:PORT; received 'x.yaml'"),
        (["0", "a:1"], "expected -- between"),
        (["0", "a:1", "--"], "expected a config"),
    ],
)
def test_what_the_cluster_script_does_not_understand(machine: Machine, words: list[str], message: str) -> None:
    code, out, err = machine(SCRIPTS / "hand_started_cluster.sh", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "usage: hand_started_cluster.sh INDEX HOST:PORT" in err


@pytest.mark.slow  # in CI the same job with a config that fails
def test_the_ci_job(machine: Machine) -> None:
    """`ci_smoke.sh` validates, trains and exports one config. The next test tries several with a fake `distlaunch`."""
    code, out, err = machine(SCRIPTS / "ci_smoke.sh", CONFIGS / "mnist_mlp.yaml", ARTIFACTS="logs")
    assert (code, err) == (0, ""), out
    logs = machine.directory / "logs"
    assert out.splitlines()[-1].split(" (")[0] == "ok    mnist_mlp"
    assert (logs / "summary.txt").read_text().splitlines() == out.splitlines()[-1:]
    assert "ok (strategy" in (logs / "mnist_mlp/validate.log").read_text()
    assert "the model was exported" in (logs / "mnist_mlp/train.log").read_text()
    assert RunDir(logs / "mnist_mlp/runs/mnist-mlp-smoke").finished()


def test_the_ci_job_fails_with_one_config_and_tries_all(machine: Machine) -> None:
    """With `distlaunch` replaced: fast, and it hangs as asked."""
    command = machine.directory / "bin/distlaunch"
    command.write_text(
        '#!/bin/sh\necho "$1 $2"\ncase "$1 $2" in\n"validate wrong.yaml") exit 2;;\n"train bad.yaml") exit 3;;\n'
        '"train slow.yaml") exec sleep 60;;\nesac\n'
    )
    configs = [f"{name}.yaml" for name in ("wrong", "bad", "slow", "good")]
    code, out, err = machine(SCRIPTS / "ci_smoke.sh", *configs, "other/good.yaml", TIMEOUT_S="1")
    assert code == 1
    assert [line.split(" (")[0] + line.split(" s)")[1] for line in out.splitlines()[-5:]] == [
        "FAIL  wrong: is not valid, see ci-smoke/wrong/validate.log",
        "FAIL  bad: ended with exit code 3, see ci-smoke/bad/train.log",
        "FAIL  slow: took longer than 1 s, see ci-smoke/slow/train.log",
        "ok    good: proven by a smoke run",
        "ok    good: proven by a smoke run",
    ]
    assert "train bad.yaml" in err
    assert (machine.directory / "ci-smoke/good-2/train.log").read_text() == "train other/good.yaml\n"


@pytest.mark.slow  # in CI a mesh in a notebook, below
def test_the_notebook(machine: Machine) -> None:
    code, out, err = machine(sys.executable, SCRIPTS / "notebook_run.py")
    assert code == 0, err
    epochs = [line.split("  ")[0] for line in out.splitlines() if line.startswith("epoch ")]
    assert epochs == ["epoch 1/2", "epoch 2/2", "epoch 3/4", "epoch 4/4"]
    assert "resuming from step 64 of notebook" in out
    assert out.splitlines()[-2].startswith("4 epochs, loss ")
    run = machine.run("notebook")
    assert run.finished()
    assert run.config.read_text() == run.attempt_config(1).read_text()
    assert run.next_attempt() == 2


NOTEBOOK = (Path(__file__).parent / "user_code" / "scripts.py").read_text()


STOP = """\
import os, signal
import keras

class Stop(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.at = step

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, self.at):
            os.kill(os.getpid(), signal.SIGINT)
"""


MESH_CELL = """\
import sys
import numpy as np
from distlaunch.base.errors import UsageError
from distlaunch.notebook import train

CONFIG, kind, other = sys.argv[1:]
mesh = ["strategy.mesh={batch: 3}", "name=mesh", "cluster.workers=1"]
result = train(CONFIG, [f"strategy.kind={kind}", *mesh])
print(result.status, result.model.predict(np.ones((4, 2)), verbose=0).shape)
for refused in ([f"strategy.kind={other}"], [f"strategy.kind={kind}", "cluster.workers=3"]):
    try:
        train(CONFIG, [*mesh, *refused])
    except UsageError as error:
        print(error)
"""


# the test below has TensorFlow in a notebook
@pytest.mark.parametrize(
    ("kind", "other", "backend"),
    [
        pytest.param("jax", "dtensor", "jax", marks=pytest.mark.slow),
        pytest.param("dtensor", "jax", "tensorflow", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_in_a_notebook(machine: Machine, kind: str, other: str, backend: str) -> None:
    (machine.directory / "cells.py").write_text(MESH_CELL)
    code, out, err = machine(sys.executable, "cells.py", CONFIGS / "linear_regression.yaml", kind, other)
    assert code == 0, out[-2000:] + err
    done, wrong_backend, several = out.splitlines()[-3:]
    assert done == "done (4, 1)"
    assert wrong_backend.startswith(f"Keras runs on {backend} in this process, but '{other}' needs it on")
    assert several.startswith("cluster.workers: got 3")


@pytest.mark.slow  # in CI the notebooks above are run to their ends
def test_what_a_notebook_cannot_do_and_an_interrupt(machine: Machine) -> None:
    (machine.directory / "cells.py").write_text(NOTEBOOK)
    (machine.directory / "stop.py").write_text(STOP)
    code, out, err = machine(sys.executable, "cells.py", CONFIGS / "linear_regression.yaml")
    assert code == 0, out[-2000:] + err
    lines = [line for line in out.splitlines() if not line.startswith(("epoch ", "resuming from step "))]
    assert lines[0].startswith("strategy.kind: got 'multi_worker_mirrored', which needs separate processes")
    assert "use `distlaunch train`" in lines[0]
    assert lines[1].startswith("config: data.global_batch: got 0")
    said = lines[-8:]
    assert said[0] == "done elsewhere/first (4, 1)"
    assert said[1].startswith("4 CPU devices are needed, but TensorFlow is already running in this process with 3, ")
    assert (
        said[2:]
        == [
            "stopping after the current step; interrupt again to end at once",
            "stopped 1 True",
            "done True {'loss': True, 'val_loss': True} {4}",
        ]
        * 2
    )
    assert isinstance(read_events(machine.run("greedy").events)[-1], RunEnded)
