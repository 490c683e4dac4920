"""Parameter servers as users have them: kills, restarts, resume, both hostings, large tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real import CONFIGS, assert_nothing_left, at_step, final_state, finish, run, start, wait_for
from supervised import wait_until

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded, Evaluated, Event, RunEnded, TaskRestarted, TaskStarted
from distlaunch.base.run_dir import RunDir

FASHION = str(CONFIGS / "fashion_mnist_servers.yaml")
REGRESSION = str(CONFIGS / "linear_regression_servers.yaml")
RECOMMENDER = str(CONFIGS / "recommender.yaml")
NO_EXPORT = ("--set", "export=[]")
NO_EVALUATOR = ("--set", "cluster.evaluator=false")


def set_(*assignments: str) -> tuple[str, ...]:
    return tuple(word for assignment in assignments for word in ("--set", assignment))


def events_of(run_dir: RunDir, task: str, attempt: int = 0) -> list[Event]:
    own = run_dir.events if task == "chief:0" else run_dir.task(attempt, task).events
    return [event for event in read_events(own) if event.task == task and event.attempt == attempt]


def pids_of(run_dir: RunDir, task: str) -> list[int]:
    """Return the process ID of each start of a task in the first attempt, oldest first."""
    return [event.pid for event in events_of(run_dir, task) if isinstance(event, TaskStarted)]


def epochs_of(run_dir: RunDir) -> list[EpochEnded]:
    return [event for event in read_events(run_dir.events) if isinstance(event, EpochEnded)]


def kill_workers(run_dir: RunDir, times: int, job: subprocess.Popen[str]) -> None:
    """Kill -9 of one worker after the other, each as soon as it has come up again."""
    for number in range(times):
        task, wanted = f"worker:{number % 2}", number // 2 + 1
        wait_until(lambda t=task, n=wanted: len(pids_of(run_dir, t)) >= n or job.poll() is not None, timeout_s=120)
        assert job.poll() is None, "the job is too short for so many kills"
        os.kill(pids_of(run_dir, task)[-1], signal.SIGKILL)


# after four epochs, the order of asynchronous steps still decides whether the accuracy is above 0.8
@pytest.mark.parametrize(("kills", "epochs"), [(2, 8), pytest.param(20, 60, marks=pytest.mark.slow)])
def test_killed_workers_cost_no_step(tmp_path: Path, kills: int, epochs: int) -> None:
    """Each step is counted once: the counter, the optimizer's iterations, and the examples of each epoch."""
    options = set_(f"train.epochs={epochs}", f"checkpoint.keep={epochs + 1}", "data.train_examples=4000")
    job = start("train", FASHION, *NO_EXPORT, *NO_EVALUATOR, *options, cwd=tmp_path)
    killed = RunDir(tmp_path / "runs" / "fashion-mnist-servers")
    wait_for(killed, at_step(1))
    kill_workers(killed, kills, job)
    code, _, err = finish(job, 600)
    assert code == 0, err
    assert_nothing_left(killed)
    restarted = [event for event in read_events(killed.events) if isinstance(event, TaskRestarted)]
    assert len(restarted) >= kills - 1  # the last kill may have come at the very end
    steps = [event.step for event in epochs_of(killed)]
    assert steps == [63 * (epoch + 1) for epoch in range(epochs)]
    from distlaunch.checkpoints.store import CheckpointStore

    store = CheckpointStore(killed.checkpoints)
    assert store.steps() == steps
    for step in steps:
        state = store.load(step).state
        counts = [value for name, value in state.items() if name.startswith("metric/") and name.endswith("count")]
        assert [float(count) for count in counts] == [4000.0] * len(counts)
        assert counts
        assert int(state["optimizer/adam/iteration"]) == step
    accuracy = epochs_of(killed)[-1].logs["val_accuracy"]
    assert accuracy > 0.8


@pytest.mark.slow  # in CI test_restarts.py restarts a job that has lost its chief
@pytest.mark.parametrize("task", ["ps:0", "chief:0"])
def test_a_lost_server_or_coordinator_restarts_the_job_once(tmp_path: Path, task: str) -> None:
    options = set_("train.epochs=4", "data.train_examples=3200", "checkpoint.every_steps=20", "cluster.workers=1")
    job = start("train", FASHION, *NO_EXPORT, *options, cwd=tmp_path)
    lost = RunDir(tmp_path / "runs" / "fashion-mnist-servers")
    wait_for(lost, at_step(70))
    os.kill(pids_of(lost, task)[-1], signal.SIGKILL)
    code, _, err = finish(job)
    assert code == 0, err
    assert_nothing_left(lost)
    assert lost.next_attempt() == 2
    ends = [event for event in read_events(lost.events) if isinstance(event, RunEnded)]
    assert [(end.attempt, end.status) for end in ends] == [(0, "failed"), (1, "done")]
    assert ends[-1].step == 200
    saved = final_state(lost)
    assert int(saved["optimizer/adam/iteration"]) == 200
    # the evaluator of the second attempt goes on where that of the first was
    curve = [e.step for attempt in (0, 1) for e in events_of(lost, "evaluator:0", attempt) if isinstance(e, Evaluated)]
    assert curve == sorted(set(curve))
    assert curve[-1] == 200


LOADED = """
import keras, numpy as np
model = keras.models.load_model("last.keras")
parts = {"model": model.weights, "optimizer": model.optimizer.variables}
np.savez("variables.npz", **{f"{name}_{i}": v.numpy() for name, part in parts.items() for i, v in enumerate(part)})
"""
"""What a callback of the split model has written, as any Keras loads it."""


@pytest.mark.slow  # in CI the chain of tests/parity/test_any_to_any.py goes through split variables
def test_one_worker_stopped_and_resumed_is_as_never_stopped(tmp_path: Path) -> None:
    """SIGTERM: exit 4 with a checkpoint; resumed, the weights are those of the uninterrupted run, bit by bit."""
    options = (*NO_EXPORT, *NO_EVALUATOR)
    options += set_("train.epochs=3", "data.train_examples=3000", "train.steps_per_call=4")
    options += set_("determinism=true", "cluster.workers=1", "cluster.ps=2")
    partitioned = set_("strategy.partitioner={kind: fixed_shards, num_shards: 2}")
    partitioned += set_("train.callbacks=[{name: ModelCheckpoint, args: {filepath: last.keras}}]")
    code, _, err = run("train", FASHION, *options, "--name", "whole", cwd=tmp_path)
    assert code == 0, err
    job = start("train", FASHION, *options, *partitioned, "--name", "stopped", cwd=tmp_path)
    stopped = RunDir(tmp_path / "runs" / "stopped")
    wait_for(stopped, at_step(60))
    job.send_signal(signal.SIGTERM)
    code, _, err = finish(job)
    assert code == 4, err
    assert_nothing_left(stopped)
    code, _, err = run("train", str(stopped.path), "--resume", cwd=tmp_path)
    assert code == 0, err
    expected, got = final_state(RunDir(tmp_path / "runs" / "whole")), final_state(stopped)
    assert expected.keys() == got.keys(), "a split variable is stored whole"
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=stopped.path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    written = np.load(stopped.path / "variables.npz")
    trained = [value for name, value in expected.items() if name.startswith("model/")]
    slots = [value for name, value in expected.items() if name.startswith("optimizer/")]
    for group, values in (("model", trained), ("optimizer", slots)):
        assert len(values) == sum(name.startswith(group) for name in written)
        for index, value in enumerate(values):
            np.testing.assert_array_equal(written[f"{group}_{index}"], value)


@pytest.mark.slow  # in CI test_parameter_server.py of the parity tests has both
def test_both_hostings_give_the_same_report(tmp_path: Path) -> None:
    """Both hostings of parameter servers give the same report. With one worker, the numbers are the same, too."""
    reports = {}
    for hosting in ("in_process", "processes"):
        options = set_(f"cluster.hosting={hosting}", "cluster.workers=1")
        code, _, err = run("train", REGRESSION, *options, "--name", hosting, cwd=tmp_path)
        assert code == 0, err
        code, out, err = run("report", f"runs/{hosting}", "--json", cwd=tmp_path)
        assert code == 0, err
        reports[hosting] = json.loads(out)
    first, second = reports.values()
    for key in ("strategy", "status", "epochs", "variables", "evaluations"):
        if key in first:
            assert without_times(first[key]) == without_times(second[key]), key
    assert first["variables"]
    assert len(first["epochs"]) == 5


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in ("seconds", "time")}
    return [without_times(part) for part in value] if isinstance(value, list) else value


@pytest.mark.slow  # the chain of tests/parity/test_any_to_any.py has the same changes, of another model
def test_a_checkpoint_goes_from_one_device_to_servers_and_on(tmp_path: Path) -> None:
    """A run on one device resumes with variables split over servers, then mirrored, with the losses of one device."""
    options = set_("data.args.ratings=12000", "train.epochs=3", "cluster.workers=1")
    code, _, err = run("train", RECOMMENDER, *options, "--set", "strategy.kind=one_device", "--name", "whole",
                       cwd=tmp_path)  # fmt: skip
    assert code == 0, err
    stages = ("one_device", "parameter_server", "mirrored")
    for epochs, kind in enumerate(stages, 1):
        target = RECOMMENDER if epochs == 1 else "runs/chain"
        words = set_(f"train.epochs={epochs}", f"strategy.kind={kind}")
        if kind == "parameter_server":
            words += set_("strategy.partitioner={kind: fixed_shards, num_shards: 2}", "cluster.ps=2")
        again = ("--name", "chain", *options) if epochs == 1 else ("--resume",)
        code, _, err = run("train", target, *again, *words, cwd=tmp_path)
        assert code == 0, err
    whole, chain = (epochs_of(RunDir(tmp_path / "runs" / name)) for name in ("whole", "chain"))
    assert [epoch.logs for epoch in chain] == [pytest.approx(epoch.logs, rel=1e-5) for epoch in whole]


BROKEN = """
import keras, numpy as np, tensorflow as tf

def model():
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])

def rows():
    for number in range(512):
        if number == 300:
            raise ValueError("row 300 is broken")
        yield np.full(4, number, np.float32), np.zeros(1, np.float32)

def data():
    spec = (tf.TensorSpec([4]), tf.TensorSpec([1]))
    made = tf.data.Dataset.from_generator(rows, output_signature=spec)
    return {"train": made.apply(tf.data.experimental.assert_cardinality(512))}
"""


@pytest.mark.slow  # in CI test_input.py names what cannot be read
def test_a_failure_to_read_names_the_worker_and_the_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    config = {
        "model": {"function": "broken.py:model"},
        "data": {"function": "broken.py:data", "global_batch": 16, "shuffle": False},
        "compile": {"optimizer": {"name": "SGD", "args": {"learning_rate": 1e-7}}, "loss": "mse"},
        "strategy": {"kind": "parameter_server"},
        "cluster": {"workers": 2, "ps": 1},
    }
    (tmp_path / "broken.yaml").write_text(json.dumps(config))
    code, _, err = run("train", "broken.yaml", cwd=tmp_path)
    assert code == 3, err
    assert "failed: worker:" in err
    assert "row 300 is broken" in err
    assert "broken.py" in err
    assert_nothing_left(RunDir(tmp_path / "runs" / "broken"))


LABELS = """
import keras, numpy as np, tensorflow as tf

def model():
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")])

def rows():
    for number in range(128):
        yield np.zeros(4, np.float32), number % 3 if number < 100 else 7

def data():
    spec = (tf.TensorSpec([4]), tf.TensorSpec([], tf.int64))
    return {"train": tf.data.Dataset.from_generator(rows, output_signature=spec)}
"""


def test_a_label_outside_the_outputs_is_named_and_nothing_is_restarted(tmp_path: Path) -> None:
    (tmp_path / "labels.py").write_text(LABELS)
    config = {
        "model": {"function": "labels.py:model"},
        "data": {"function": "labels.py:data", "global_batch": 16, "shuffle": False},
        "compile": {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"},
        "train": {"steps_per_epoch": 8},
        "strategy": {"kind": "parameter_server"},
        "cluster": {"workers": 2, "ps": 1},
    }
    (tmp_path / "labels.yaml").write_text(json.dumps(config))
    code, _, err = run("train", "labels.yaml", cwd=tmp_path)
    assert code == 3, err
    assert (
        "data: got the label 7 in a batch, but sparse_categorical_crossentropy takes class numbers from 0 to 2" in err
    )
    assert not (tmp_path / "runs" / "labels" / "attempts" / "1").exists()
    assert_nothing_left(RunDir(tmp_path / "runs" / "labels"))


# a table in one piece is read as a tensor by Keras's layer: that this shows up proves that the test can fail
WHOLE = pytest.param("null", marks=pytest.mark.slow)
INSPECT = Path(__file__).parent / "scripts" / "graph_sizes.py"


@pytest.mark.parametrize(
    "partitioner", [pytest.param("{kind: fixed_shards, num_shards: 2}", marks=pytest.mark.slow), WHOLE]
)
def test_a_table_is_looked_up_in_its_shards(tmp_path: Path, partitioner: str) -> None:
    """No tensor of a step has the size of the table, nor of a shard: rows are gathered where they lie."""
    words = [f"strategy.partitioner={partitioner}", "cluster.hosting=in_process", "compile.optimizer.name=SGD"]
    done = subprocess.run([sys.executable, INSPECT, RECOMMENDER, *words], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == (["False", "False"] if partitioner != "null" else ["True", "False"])


@pytest.mark.slow
def test_a_table_too_large_for_a_message(tmp_path: Path) -> None:
    """2.3 GB in one table: no gRPC message can hold it (2 GiB is the most). Takes 10 GB of memory."""
    options = set_("model.args={users: 9000000, dim: 64}", "data.args={users: 9000000, ratings: 20000}",
                   "compile.optimizer={name: SGD, args: {learning_rate: 0.5}}", "train.epochs=1", "checkpoint.keep=1",
                   "strategy.partitioner={kind: max_size, max_shard_bytes: 600000000}")  # fmt: skip
    code, _, err = run("train", RECOMMENDER, *options, cwd=tmp_path, limit_s=900)
    assert code == 0, err
    placed = json.loads(run("report", "runs/recommender", "--json", cwd=tmp_path)[1])["variables"]
    table = next(variable for variable in placed if variable["name"] == "model/user_factors/embeddings")
    assert len(table["parts"]) == 4
    assert sum(part["bytes"] for part in table["parts"]) == 9_000_000 * 64 * 4


@pytest.mark.slow  # in CI its numbers are compared in tests/parity
def test_the_linear_regression_converges_as_on_one_device(tmp_path: Path) -> None:
    """3 workers, 2 servers, 5 epochs of 10 steps and an evaluation of 10, as in the migration guide."""
    for name, options in {"servers": (), "one": set_("strategy.kind=one_device")}.items():
        code, _, err = run("train", REGRESSION, *options, "--name", name, cwd=tmp_path)
        assert code == 0, err
    servers, one = (epochs_of(RunDir(tmp_path / "runs" / name)) for name in ("servers", "one"))
    assert [epoch.step for epoch in servers] == [10, 20, 30, 40, 50]
    assert servers[-1].logs == pytest.approx(one[-1].logs, abs=0.01)
    assert servers[-1].logs["loss"] < 0.01


@pytest.mark.slow
def test_fashion_mnist_is_within_a_point_of_synchronous_training(tmp_path: Path) -> None:
    accuracy = {}
    for name, options in {"servers": (), "one": set_("strategy.kind=one_device", "cluster.evaluator=false")}.items():
        code, _, err = run("train", FASHION, *NO_EXPORT, *options, "--name", name, cwd=tmp_path, limit_s=600)
        assert code == 0, err
        last = epochs_of(RunDir(tmp_path / "runs" / name))[-3:]
        accuracy[name] = sum(epoch.logs["val_accuracy"] for epoch in last) / len(last)
    assert accuracy["servers"] == pytest.approx(accuracy["one"], abs=0.01), accuracy
