"""The whole product with real workers: training, kills, exact resume, evaluation, export, one's own model."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real import (
    CONFIGS,
    assert_nothing_left,
    at_step,
    final_state,
    finish,
    json_lines,
    kill_task,
    run,
    start,
    wait_for,
)

from distlaunch.base.errors import ExitCode
from distlaunch.base.event_files import read_events
from distlaunch.base.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    Restored,
    RunEnded,
    StepsDone,
    TaskFailed,
    TrainingStarted,
)
from distlaunch.base.run_dir import RunDir
from distlaunch.runs.goodput import run_goodput

TWO_WORKERS = ("--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2")
SHORT = ("--set", "data.train_examples=1000", "--set", "train.epochs=3", "--set", "determinism=true")
MAIN = str(CONFIGS / "fashion_mnist.yaml")
SINGLE = str(CONFIGS / "fashion_mnist_one_device.yaml")
SHIPPED = ("--set", "data.args.source=shipped")


CUSTOM = ("--set", "strategy.kind=mirrored", "--set", "strategy.replicas=2", "--set", "train.loop=custom")


@pytest.mark.parametrize(
    "strategy",
    # on hosts, tests/cluster/ kills workers in CI, and tests/properties/test_resume.py has one device
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(CUSTOM, marks=pytest.mark.slow),
        pytest.param(TWO_WORKERS, marks=pytest.mark.slow),
    ],
    ids=["one_device", "mirrored, custom", "two workers"],
)
def test_killed_and_resumed_is_as_never_killed(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    """Kill -9 within an epoch: exit 3, the culprit named; resumed, it ends with the same weights, bit by bit."""
    options = (*strategy, *SHIPPED, *SHORT, "--set", "checkpoint.every_steps=5", "--set", "train.steps_per_call=2")
    code, _, err = run("train", SINGLE, *options, "--name", "whole", cwd=tmp_path)
    assert code == 0, err
    job = start("train", SINGLE, *options, "--set", "train.log_every_steps=1", "--name", "killed", cwd=tmp_path)
    killed = RunDir(tmp_path / "runs" / "killed")
    wait_for(killed, at_step(23))  # in the second epoch of 16 steps
    wait_for(killed, lambda events: any(isinstance(event, CheckpointSaved) and event.step >= 20 for event in events))
    victim = 1 if strategy == TWO_WORKERS else 0
    kill_task(killed, victim)
    code, _, err = finish(job)
    assert code == ExitCode.TEMPORARY, err
    [failed] = [event for event in read_events(killed.events) if isinstance(event, TaskFailed)]
    assert (failed.failed_task, "SIGKILL" in failed.reason) == (f"worker:{victim}", True), err
    assert_nothing_left(killed)
    code, _, err = run("train", str(killed.path), "--resume", cwd=tmp_path)
    assert code == 0, err
    [restored] = [event for event in read_events(killed.events) if isinstance(event, Restored)]
    assert (restored.attempt, restored.epoch, restored.step % 5) == (1, 1, 0)
    assert restored.step >= 20, "a checkpoint of this step was there"
    goodput = run_goodput(killed)
    assert goodput is not None
    assert all(
        goodput.seconds[part] > 0 for part in ("steps", "start", "build", "compile", "restore", "lost", "pauses")
    )
    expected, got = final_state(RunDir(tmp_path / "runs" / "whole")), final_state(killed)
    assert expected.keys() == got.keys()
    assert all(np.array_equal(expected[name], got[name]) for name in expected)
    assert epoch_logs(killed) == epoch_logs(RunDir(tmp_path / "runs" / "whole"))


def epoch_logs(run_dir: RunDir) -> dict[int, dict[str, float]]:
    """The last report of each epoch: the one in which the run was killed is there as if it had not been."""
    return {event.epoch: event.logs for event in read_events(run_dir.events) if isinstance(event, EpochEnded)}


def test_ctrl_c_saves_and_resumes(tmp_path: Path) -> None:
    """Ctrl-C on two workers: both stop at the same step with a checkpoint; another strategy goes on from it."""
    job = start("train", MAIN, "--set", "train.steps_per_call=1", "--name", "stopped", cwd=tmp_path)
    stopped = RunDir(tmp_path / "runs" / "stopped")
    wait_for(stopped, at_step(10))
    job.send_signal(signal.SIGINT)
    code, out, err = finish(job, 60)
    assert code == 4, err
    assert "Traceback" not in out + err
    steps = [int(path.name.removeprefix("step-")) for path in stopped.checkpoints.glob("step-*")]
    assert max(steps) >= 10
    assert_nothing_left(stopped)
    other = ("--set", "strategy.kind=mirrored", "--set", "train.epochs=1", "--set", "export=[]")
    code, out, err = run("train", str(stopped.path), "--resume", *other, "--json", cwd=tmp_path)
    assert code == 0, err
    restored = [event for event in json_lines(out) if event["event"] == "Restored"]
    assert restored[0]["step"] == max(steps)


def test_the_main_job_evaluates_and_exports(tmp_path: Path) -> None:
    """Two workers on the shipped data; `evaluate` gives the same numbers; the exports load in a clean process."""
    options = ("--set", "train.epochs=1", "--set", "data.validation_examples=333", "--metrics-file", "job.prom")
    code, out, err = run("train", MAIN, *options, "--json", cwd=tmp_path)
    assert code == 0, err
    epoch = [event for event in json_lines(out) if event["event"] == "EpochEnded"][-1]
    ended = epoch["logs"]
    assert epoch["learning_rate"] == pytest.approx(0.001)
    timed = [event for event in json_lines(out) if event["event"] == "StepsTimed"][-1]
    assert 0 < timed["peers_s"] < timed["seconds"]
    assert f'distlaunch_step{{run="fashion-mnist"}} {epoch["step"]}.0' in (tmp_path / "job.prom").read_text()
    run_dir = RunDir(tmp_path / "runs" / "fashion-mnist")
    code, out, err = run("evaluate", str(run_dir.path), "--json", cwd=tmp_path)
    assert code == 0, err
    evaluated = next(event for event in json_lines(out) if event["event"] == "Evaluated")["logs"]
    assert evaluated["loss"] == pytest.approx(ended["val_loss"], rel=1e-5)
    assert evaluated["accuracy"] == pytest.approx(ended["val_accuracy"], rel=1e-6)
    code, _, err = run("evaluate", str(run_dir.path), "--checkpoint", "7", cwd=tmp_path)
    assert code == 2
    assert "has no checkpoint of step 7; available:" in " ".join(err.split())
    assert "Traceback" not in err
    code, out, err = run("predict", str(run_dir.path), "--json", cwd=tmp_path)
    assert code == 0, err
    predicted = next(event for event in json_lines(out) if event["event"] == "Predicted")
    assert (predicted["split"], predicted["shapes"]) == ("validation", {"predictions": [333, 10]})
    assert accuracy_of_predictions(Path(predicted["path"])) == pytest.approx(evaluated["accuracy"], abs=1e-6)
    assert accuracy_of_export(run_dir) == pytest.approx(evaluated["accuracy"], abs=1e-6)


def accuracy_of_predictions(path: Path) -> float:
    """Right only if the two workers' rows are in the order of the examples."""
    from distlaunch.workloads.images import fashion_mnist

    with np.load(path) as arrays:
        return float((arrays["predictions"].argmax(-1) == fashion_mnist("shipped")["validation"][1][:333]).mean())


def accuracy_of_export(run_dir: RunDir) -> float:
    """Loads both exports where there is no distlaunch code and no strategy."""
    code = f"""
import numpy as np, keras, tensorflow as tf
from distlaunch.workloads.images import fashion_mnist
x, y = (part[:333] for part in fashion_mnist("shipped")["validation"])
kept = keras.models.load_model({str(run_dir.export / "model.keras")!r}).predict(x, verbose=0)
exported = tf.saved_model.load({str(run_dir.export / "saved_model")!r})
served = exported.serve(x).numpy()
assert np.abs(kept - served).max() < 1e-4
print("accuracy", (kept.argmax(-1) == y).mean())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    options = (*SHIPPED, *SHORT, "--name", "damaged")
    assert run("train", SINGLE, *options, cwd=tmp_path)[0] == 0
    run_dir = RunDir(tmp_path / "runs" / "damaged")
    newest = max(run_dir.checkpoints.glob("step-*")) / "state.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    code, out, err = run("evaluate", str(run_dir.path), "--json", cwd=tmp_path)
    assert code == 0, err
    events = json_lines(out)
    assert next(e for e in events if e["event"] == "Restored")["step"] == 32
    assert "checksum" in next(e for e in events if e["event"] == "CheckpointFailed")["reason"]


OWN = """
import keras, numpy as np

def model(units):
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)])

def data(fail=False):
    if fail:
        raise RuntimeError("no such table")
    x = np.random.default_rng(0).normal(size=(100, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)
"""
OWN_CONFIG = """
model: {function: "mine.py:model", args: {units: 4}}
data: {function: "mine.py:data", global_batch: 10}
compile: {optimizer: sgd, loss: mse}
train:
  epochs: 2
  callbacks:
  - {name: CSVLogger, args: {filename: logs/log.csv}}
  - {name: ModelCheckpoint, args: {filepath: "${run_dir}/{epoch}.keras"}}
  - {name: EarlyStopping, args: {monitor: loss}}
checkpoint: {every_steps: 5}
strategy: {kind: mirrored, replicas: 2}
"""


def test_my_own_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "mine.yaml").write_text(OWN_CONFIG)
    code, out, err = run("train", "mine.yaml", "--quiet", cwd=tmp_path)
    assert (code, out) == (0, ""), err
    first, second = (RunDir(tmp_path / "runs" / name) for name in ("mine", "mine-2"))
    # callbacks write to the run directory: that config.yaml again is another run, and --resume goes on with its own
    assert run("train", str(first.config), "--quiet", cwd=tmp_path)[0] == 0
    assert run("train", str(first.path), "--resume", "--set", "train.epochs=3", "--quiet", cwd=tmp_path)[0] == 0
    for run_dir, epochs in ((first, 3), (second, 2)):
        assert len((run_dir.path / "logs/log.csv").read_text().splitlines()) == epochs + 1
        assert len(list(run_dir.path.glob("*.keras"))) == epochs
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"mine.py", "mine.yaml", "runs"}
    assert "deprecated" not in first.task(0, "worker:0").stderr_log.read_text()
    each_checkpoint_is_told_once_and_epochs_count_from_0(read_events(second.events))
    # a mistake that only the worker can see is a config error with its line, and nothing is trained
    code, _, err = run("train", "mine.yaml", "--set", "compile.loss=mine.py:nothing", cwd=tmp_path)
    assert code == 2, err
    # an exception of the user's own code is shown with its traceback
    code, _, err = run("train", "mine.yaml", "--set", "data.args.fail=true", cwd=tmp_path)
    assert code == 3
    assert "no such table" in err
    assert "mine.py" in err


def each_checkpoint_is_told_once_and_epochs_count_from_0(events: list[Event]) -> None:
    """With a checkpoint within the epochs, at their ends, before and after the callbacks' last words."""
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [5, 10, 15, 20]
    assert [event.epoch for event in events if isinstance(event, EpochEnded)] == [0, 1]
    assert [event.epoch for event in events if isinstance(event, StepsDone) and event.step in (10, 20)] == [0, 1]
    assert [event.first_epoch for event in events if isinstance(event, TrainingStarted)] == [0]
    assert [event.epochs_done for event in events if isinstance(event, RunEnded)] == [2]


# elsewhere in CI: tests/parity trains the model of the first two, test_scripts.py the next, tests/parity those of most
# others under their strategies, test_parameter_server.py and test_the_main_job_evaluates_and_exports trains one each;
# other tests run the rest, or a config beside them that differs in one line or in the format of its files
# (tests/unit/test_files_tfrecord.py, test_files_text.py, test_files_images.py)
ELSEWHERE = (
    "sentiment", "sentiment_spatial_parallel", "sentiment_model_parallel", "linear_regression",
    "transformer_dtensor", "transformer_jax", "convnet", "convnet_jax", "recommender",
    "fashion_mnist_custom_loop", "fashion_mnist_one_device", "fashion_mnist_servers", "mnist_mlp", "mnist_mlp_jax",
    "fashion_mnist", "files_images", "files_records", "files_table", "linear_regression_servers", "mnist_mlp_dtensor",
)  # fmt: skip
SMOKE = [
    pytest.param(path, marks=pytest.mark.slow if path.stem in ELSEWHERE else (), id=path.stem)
    for path in sorted(CONFIGS.glob("*.yaml"))
]


@pytest.mark.parametrize("config", SMOKE)
def test_every_config_passes_its_smoke_test(config: Path, tmp_path: Path) -> None:
    code, out, err = run("train", str(config), "--smoke", *smoke_source(config), cwd=tmp_path)
    assert code == 0, out + err


def smoke_source(config: Path) -> tuple[str, ...]:
    return SHIPPED if "fashion_mnist" in config.read_text() else ()
