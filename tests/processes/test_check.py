"""`train.check` on real processes: steps are compared with one device, and planted faults end a strict run."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from real import finish, run, start, wait_for

from distlaunch.base.event_files import read_events
from distlaunch.base.events import NumbersChecked, StepsDone
from distlaunch.base.run_dir import RunDir
from distlaunch.training.first_steps.process import CHECK_LOG
from tests.parity.planted_faults import FAULTS

MODELS = Path(__file__).parents[1] / "parity" / "planted_faults.py"
CONFIG = f"""
model: {{function: "{MODELS}:model"}}
data: {{function: "{MODELS}:data", global_batch: 16}}
train: {{check: strict}}
restarts: {{max: 2}}
strategy: {{kind: mirrored, replicas: 2}}
"""
STRATEGIES = {
    "mirrored": ("strategy={kind: mirrored, replicas: 2}",),
    "multi_worker_mirrored": ("strategy={kind: multi_worker_mirrored}", "cluster.workers=2"),
    "dtensor": ("strategy={kind: dtensor, mesh: {batch: 2}}",),
    "jax": ("strategy={kind: jax, mesh: {batch: 2}}",),
    "parameter_server": ("strategy={kind: parameter_server}", "cluster={workers: 2, ps: 1}"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def train(folder: Path, *settings: str) -> tuple[int, str, list[NumbersChecked]]:
    """Exit code, what was printed, and the results."""
    words = [word for setting in settings for word in ("--set", setting)]
    code, out, err = run("train", "mine.yaml", *words, cwd=folder, limit_s=300)
    assert "Traceback" not in out + err
    return code, " ".join((out + err).split()), checked(folder)


def checked(folder: Path) -> list[NumbersChecked]:
    return [event for event in read_events(run_of(folder).events) if isinstance(event, NumbersChecked)]


def run_of(folder: Path) -> RunDir:
    """The newest run."""
    return RunDir(max((folder / "runs").glob("mine*"), key=lambda path: path.stat().st_ctime))


def test_a_planted_fault_ends_a_strict_run(folder: Path) -> None:
    code, printed, (event,) = train(folder, "model.args.fault=gradients", *STRATEGIES["multi_worker_mirrored"])
    assert (code, event.status, event.part) == (3, "differs", "step 1")
    assert "at step 1: numbers differ from one device in step 1: the update of" in printed
    assert "the size of the gradients (2 times that on one device)" in printed
    assert run_of(folder).attempts() == [0], "it would fail again"
    log = run_of(folder).task(0, "worker:0").path / CHECK_LOG
    assert b"distlaunch.tasks.check" not in log.read_bytes(), "it would have imported TensorFlow a second time"
    assert b"distlaunch" in log.read_bytes()


@pytest.mark.slow
def test_batch_norm_is_documented_and_can_be_equal(folder: Path) -> None:
    code, printed, (event,) = train(folder, "model.args.synchronized=false", "train.epochs=1")
    assert (code, event.status) == (0, "documented")
    assert "write `synchronize_batch_norm: true`" in printed
    code, printed, _ = train(folder, "model.args.synchronized=false", "synchronize_batch_norm=true")
    assert code == 0
    assert "numbers steps 1-3, step 4 with 5 rows and validation equal one device" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [*itertools.product(STRATEGIES, ("mlp", "cnn", "transformer"))])
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_planted_fault_is_named_everywhere(folder: Path, strategy: str, kind: str, fault: str) -> None:
    arguments = (f"model.args.kind={kind}", f"data.args.kind={kind}", *([f"model.args.fault={fault}"] if fault else []))
    code, printed, events = train(folder, *STRATEGIES[strategy], *arguments)
    if not fault:
        assert code == 0, printed
        # the transformer has an embedding
        documented = (strategy, kind) == ("dtensor", "transformer")
        assert [event.status for event in events] == (["documented"] if documented else ["equal"] * 3)
        return
    assert (code, events[-1].status, events[-1].part) == (3, "differs", "step 1")
    assert FAULTS[fault] in events[-1].message


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_no_process(folder: Path) -> None:
    started = start("train", "mine.yaml", "--set", "train.check=auto", "--set", "train.epochs=100000", cwd=folder)
    run_dir = RunDir(folder / "runs" / "mine")
    wait_for(run_dir, lambda events: any(isinstance(event, StepsDone) and event.step > 5 for event in events))
    started.send_signal(signal.SIGINT)
    assert finish(started)[0] == 4
    assert not [process for process in psutil.process_iter() if _writes_to(process, run_dir)]


def _writes_to(process: psutil.Process, run_dir: RunDir) -> bool:
    try:
        return str(run_dir.path) in os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return False


@pytest.mark.slow
def test_a_run_is_compared_once_unless_it_changes(folder: Path) -> None:
    words = ("--set", "checkpoint.every_steps=1")
    assert run("train", "mine.yaml", *words, cwd=folder, limit_s=300)[0] == 0
    first = checked(folder)
    again = ("runs/mine", "--resume", "--set", "train.epochs=2")
    assert run("train", *again, cwd=folder, limit_s=300)[0] == 0
    assert len(checked(folder)) > len(first), "the number of epochs may change learning rates"
    replicas = ("runs/mine", "--resume", "--set", "train.epochs=3", "--set", "strategy.replicas=3")
    assert run("train", *replicas, cwd=folder, limit_s=300)[0] == 0
    assert {event.status for event in checked(folder)} == {"equal"}
    report = json.loads(run("report", "runs/mine", "--json", cwd=folder)[1])
    assert [part["status"] for part in report["numbers"]] == ["equal"] * 3


EMBEDDING = """
import keras
import numpy as np
from keras import layers


def data():
    x = np.random.default_rng(3).integers(0, 50, size=(60, 6)).astype("int32")
    return {"train": (x, (x.sum(1) % 3).astype("int32"))}


def model():
    made = keras.Sequential(
        [layers.Input((6,), dtype="int32"), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(3)]
    )
    made.compile(keras.optimizers.RMSprop(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dense_gradients_of_embeddings_are_documented(folder: Path, strategy: str) -> None:
    (folder / "emb.py").write_text(EMBEDDING)
    own = ("model.function=emb.py:model", "data.function=emb.py:data", *STRATEGIES[strategy])
    code, printed, events = train(folder, *own)
    assert code == 0, printed
    if strategy == "dtensor":
        assert [event.status for event in events] == ["documented"]
        assert "gradients of embeddings are dense on a mesh" in printed
    else:
        assert {event.status for event in events} == {"equal"}
