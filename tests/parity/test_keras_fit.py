"""`loop: fit` is Keras `fit`: the same history, the same calls of callbacks, on one device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.config.run import RunConfig
from distlaunch.data.source import make_split
from distlaunch.data.splits import read_splits
from distlaunch.strategies.replica.one_device import OneDevice
from distlaunch.training.build import build_model
from distlaunch.training.loop import LoopHooks, TrainingLoop
from distlaunch.training.steps.functions import make_steps
from tests.parity.cases import BATCH, CASES

pytestmark = pytest.mark.usefixtures("virtual_devices")


class Calls(keras.callbacks.Callback):
    """Writes down what is called, with the names of the logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_train_begin(self, logs=None):
        self.calls.append("train begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("epoch begin", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("batch begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("batch end", batch, sorted(logs), round(logs["loss"], 4)))

    def on_test_begin(self, logs=None):
        self.calls.append("test begin")

    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(("test batch begin", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("test batch end", batch, sorted(logs), round(logs["loss"], 4)))

    def on_test_end(self, logs=None):
        self.calls.append(("test end", sorted(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch end", epoch, sorted(logs)))

    def on_train_end(self, logs=None):
        self.calls.append(("train end", sorted(logs)))


def callbacks() -> list[Any]:
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=0.2),
        Calls(),
    ]


def prepare(name: str, **train: Any) -> tuple[RunConfig, Any, Any]:
    raw = copy.deepcopy(CASES[name])
    raw["train"] = {"epochs": 6, **train}
    config = RunConfig.model_validate(raw)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    splits = read_splits(config.data)
    return config, splits, make_split(splits.train, config.data, seed=0, training=True)


# the last batch of the weighted cases is uneven, too
UNWEIGHTED = pytest.param("mlp sgd, uneven", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [UNWEIGHTED, "class weights", "sample weights", "two inputs, two outputs"])
def test_history_and_callbacks(name: str) -> None:
    config, splits, train = prepare(
        name, steps_per_call=1, callbacks=[{"name": "CSVLogger"}]
    )  # its own are given below
    ours = build_model(config, OneDevice(), train.first_rows(2))
    validation = make_split(splits.validation, config.data, seed=0, training=False)
    own = callbacks()
    hooks = LoopHooks(lambda event: None, lambda: False, store=CheckpointStore(Path("unused")), is_chief=False)
    program = OneDevice().program(make_steps(config, ours))
    TrainingLoop(config, ours, program, train, validation, own, hooks).run(Progress())

    config, splits, train = prepare(name)
    theirs = build_model(config, OneDevice(), train.first_rows(2))
    x, y, weight = keras.utils.unpack_x_y_sample_weight(splits.train)
    kerass = callbacks()
    history = theirs.fit(
        x,
        y,
        sample_weight=weight,
        class_weight=config.data.class_weight,
        batch_size=BATCH,
        shuffle=False,
        epochs=6,
        validation_data=splits.validation,
        validation_batch_size=BATCH,
        callbacks=kerass,
        verbose=0,
    )
    assert own[2].calls == kerass[2].calls
    assert ours.history.epoch == history.epoch
    assert ours.history.history.keys() == history.history.keys()
    for metric, values in history.history.items():
        assert ours.history.history[metric] == pytest.approx(values, rel=1e-5), metric
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-7)


class Ends(keras.callbacks.Callback):
    """Sets `stop_training` within the first epoch, and fails at the end of training."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        raise RuntimeError("no")


def test_what_was_trained_is_kept_when_a_callback_fails_at_the_end(tmp_path: Path) -> None:
    """The checkpoint of the step that set `stop_training` also contains this."""
    config, _, train = prepare("mlp sgd, uneven", steps_per_call=1, callbacks=[{"name": "CSVLogger"}])
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 2})})
    store = CheckpointStore(tmp_path)
    hooks = LoopHooks(lambda event: None, lambda: False, store=store, is_chief=True)

    def loop(*callbacks: keras.callbacks.Callback) -> TrainingLoop:
        model = build_model(config, OneDevice(), train.first_rows(2))
        program = OneDevice().program(make_steps(config, model))
        return TrainingLoop(config, model, program, train, None, list(callbacks), hooks)

    with pytest.raises(RuntimeError, match="no"):
        loop(Ends()).run(Progress())
    ended = store.newest_good()
    assert ended is not None
    assert (ended.progress.epoch, ended.progress.step, ended.progress.finished) == (1, 3, True)  # a step takes the vote

    asked = store.load(2)
    assert asked.progress.stop_training
    outcome = loop(keras.callbacks.Callback()).run(asked.progress, lambda: asked.state)
    assert (outcome.progress.epoch, outcome.progress.step) == (1, 3)
