"""`loop: fit` is Keras `fit`: the same history, the same calls of callbacks, on one device."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.base.events import Event, Notice
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
    """Sets `stop_training` before or within the first epoch, and fails at the end of training."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.is_testing = False

    def on_epoch_begin(self, epoch, logs=None):
        self._end("begin")

    def on_train_batch_end(self, batch, logs=None):
        self._end(f"batch {batch}")

    def on_test_begin(self, logs=None):
        self.is_testing = True

    def _end(self, here: str) -> None:
        if here == self.at:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        raise RuntimeError("no")


@pytest.mark.parametrize(("at", "steps_per_call", "step"), [("batch 1", 1, 2), ("begin", 4, 1)])
def test_a_callback_ends_training_at_once_and_loses_nothing(
    tmp_path: Path, at: str, steps_per_call: int, step: int
) -> None:
    """Training ends at the step at which `fit` ends, also with a resume before the validation, and is on disk.

    The callback fails at the end of training.
    """
    config, splits, train = prepare("mlp sgd, uneven", steps_per_call=steps_per_call, callbacks=[{"name": "CSVLogger"}])
    validation = make_split(splits.validation, config.data, seed=0, training=False)
    store = CheckpointStore(tmp_path)

    def loop(callback: keras.callbacks.Callback, should_stop: Any = lambda: False) -> TrainingLoop:
        hooks = LoopHooks(lambda event: None, should_stop, store=store, is_chief=True)
        model = build_model(config, OneDevice(), train.first_rows(2))
        program = OneDevice().program(make_steps(config, model))
        return TrainingLoop(config, model, program, train, validation, [callback], hooks)

    ends = Ends(at)
    assert loop(ends, lambda: ends.is_testing).run(Progress()).status == "stopped"
    asked = store.newest_good()
    assert asked is not None
    assert (asked.progress.epoch, asked.progress.step, asked.progress.stop_training) == (0, step, True)
    with pytest.raises(RuntimeError, match="no"):
        loop(Ends("never")).run(asked.progress, lambda: asked.state)
    ended = store.newest_good()
    assert ended is not None
    assert (ended.progress.epoch, ended.progress.step, ended.progress.finished) == (1, step, True)


class Freezes(keras.callbacks.Callback):
    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.freeze)

    def freeze(self, *_: Any) -> None:
        self.model.layers[-1].trainable = False


@pytest.mark.parametrize("strategy", [{}, {"kind": "dtensor", "mesh": {"batch": 1}}], ids=["one_device", "mesh"])
def test_a_callback_that_freezes_weights_in_vain_is_told(tmp_path: Path, strategy: dict[str, Any]) -> None:
    config, _, train = prepare("mlp sgd, uneven", epochs=2, callbacks=[{"name": "CSVLogger"}])
    # the loop is the same for all strategies
    changed = {"strategy": strategy} if strategy else {}
    on = RunConfig.model_validate({**config.model_dump(exclude_unset=True), **changed})
    events = list[Event]()

    def loop(hook: str) -> tuple[TrainingLoop, keras.Model]:
        model = build_model(config, OneDevice(), train.first_rows(2))
        hooks = LoopHooks(events.append, lambda: False, store=CheckpointStore(tmp_path / hook), is_chief=True)
        program = OneDevice().program(make_steps(config, model))
        return TrainingLoop(on, model, program, train, None, [Freezes(hook)], hooks), model

    training, model = loop("on_epoch_begin")
    training.run(Progress())
    warnings = [event.message for event in events if isinstance(event, Notice) and event.level == "warning"]
    told = "in on_epoch_begin, a callback has changed `trainable` of .*/kernel, .*/bias, which has no effect"
    assert len(warnings) == 1
    assert re.search(told, warnings[0])
    assert model.layers[-1].trainable
    training, model = loop("on_train_begin")
    if strategy:
        with pytest.raises(ConfigError, match=r"in on_train_begin, .* but a mesh has its weights by then"):
            training.run(Progress())
        return
    before = model.layers[-1].kernel.numpy()
    training.run(Progress())  # not traced yet, as in `fit`
    np.testing.assert_array_equal(model.layers[-1].kernel.numpy(), before)
