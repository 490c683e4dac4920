"""A tiny run that is killed anywhere and resumed ends like one that was not killed: weights, slots and history."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from distlaunch.base.events import Event
from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.training.session import Session

HERE = "tests.properties.test_resume"
IN_CI = 1
SLOWLY = 200
"""Examples; each takes three sessions, about two seconds."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing is written afterwards."""


class Noise(keras.layers.Layer):
    """Adds random numbers without a seed, which come from Keras's global generator."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + 0.1 * keras.random.normal(keras.ops.shape(x)) if training else x


def model() -> keras.Model:
    return keras.Sequential([keras.layers.Input((4,)), Noise(), keras.layers.Dense(3), keras.layers.Dropout(0.2)])


def data(rows: int, known: bool) -> dict[str, Any]:
    random = np.random.default_rng(0)
    arrays = random.normal(size=(rows, 4)).astype("float32"), random.integers(3, size=rows)
    train: Any = arrays
    if not known:
        train = tf.data.Dataset.from_tensor_slices(arrays).filter(lambda x, y: True)
    return {"train": train, "validation": arrays}


OPTIMIZERS = ["sgd", "adam", {"name": "SGD", "args": {"learning_rate": 0.1, "momentum": 0.9}}]
STOPPING = {"name": "EarlyStopping", "args": {"monitor": "loss", "patience": 1, "restore_best_weights": True}}
LOSS = {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}


@st.composite
def runs(draw: Callable[[Any], Any]) -> dict[str, Any]:
    known = draw(st.booleans())
    return {
        "model": {"function": f"{HERE}:model"},
        "data": {
            "function": f"{HERE}:data",
            "args": {"rows": draw(st.integers(1, 40)), "known": known},
            "global_batch": draw(st.integers(1, 50)),
            "shuffle": draw(st.booleans() | st.integers(1, 60)),
            "remainder": draw(st.sampled_from(["keep", "drop"])),
            "class_weight": draw(st.none() | st.dictionaries(st.integers(0, 12), st.floats(0, 2), min_size=1)),
        },
        "compile": {"optimizer": draw(st.sampled_from(OPTIMIZERS)), "loss": LOSS, "metrics": ["accuracy"]},
        "train": {
            "epochs": draw(st.integers(1, 4)),
            "steps_per_epoch": draw(st.none() | st.integers(1, 5)),
            "steps_per_call": draw(st.sampled_from(["auto", 1, 2, 3])),
            "callbacks": draw(st.sampled_from([[], [STOPPING]])),
        },
        "checkpoint": {"every_epochs": 1, "every_steps": draw(st.none() | st.integers(1, 5)), "keep": 2},
    }


def train(raw: dict[str, Any], folder: Path, stop_at: int, *, kill: bool) -> None:
    """Train until the call with this number, before which the process is killed or asked to stop."""
    calls = 0

    def look() -> bool:
        nonlocal calls
        calls += 1
        if calls > stop_at and kill:
            raise Killed
        return calls > stop_at

    # an attempt is a new process, in which Keras has no global generator yet
    keras.utils.clear_session(free_memory=False)
    session = Session.build(RunConfig.model_validate(raw), RunDir(folder), Task("worker", 0), Process(_nobody, look))
    session.run_training()


def _nobody(event: Event) -> None: ...


def end_of(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """History and state of the last checkpoint."""
    saved = CheckpointStore(RunDir(folder).checkpoints).newest_good()
    assert saved is not None
    return saved.progress.history, {n: v for n, v in saved.state.items() if n.startswith(("model/", "optimizer/"))}


def check(raw: dict[str, Any], stop_at: int, kill: bool) -> None:
    rows, batch = raw["data"]["args"]["rows"], raw["data"]["global_batch"]
    assume(rows >= batch or raw["data"]["remainder"] == "keep")
    with tempfile.TemporaryDirectory() as name:
        whole, resumed = Path(name, "whole"), Path(name, "resumed")
        train(raw, whole, 10_000, kill=False)
        with contextlib.suppress(Killed):
            train(raw, resumed, stop_at, kill=kill)
        train(raw, resumed, 10_000, kill=False)
        (history, expected), (again, got) = end_of(whole), end_of(resumed)
    assert again == history
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


# stopped when the only epoch's end has been read, and its validation has not begun
ENDED = {
    "model": {"function": "tests.properties.test_resume:model"},
    "data": {
        "function": "tests.properties.test_resume:data",
        "args": {"rows": 7, "known": False},
        "global_batch": 7,
        "shuffle": False,
    },
    "compile": {"optimizer": "sgd", "loss": LOSS},
    "train": {"epochs": 2, "steps_per_call": "auto"},
    "checkpoint": {"every_epochs": 1, "every_steps": None, "keep": 2},
}


@pytest.mark.usefixtures("virtual_devices")
@settings(max_examples=IN_CI)
@given(runs(), st.integers(0, 30), st.booleans())
@example(ENDED, 1, False)
def test_killed_and_resumed(raw: dict[str, Any], stop_at: int, kill: bool) -> None:
    check(raw, stop_at, kill)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 600 sessions, which take most of the usual 600 s even on an idle machine
@pytest.mark.usefixtures("virtual_devices")
@settings(max_examples=SLOWLY, derandomize=False)
@given(runs(), st.integers(0, 30), st.booleans())
def test_killed_and_resumed_often(raw: dict[str, Any], stop_at: int, kill: bool) -> None:
    check(raw, stop_at, kill)
