"""With `loop: custom`, replicas have the metrics and weights of one device, or the run says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from distlaunch import notebook
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Notice
from tests.corpus.compare import Trained, deviations
from tests.corpus.models import Largest, compiled, mean_error, net, root_error, table

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.parity.test_custom_on_replicas"
ONE, TWO = {"kind": "one_device"}, {"kind": "mirrored", "replicas": 2}


def train(
    folder: Path, strategy: dict[str, Any], model: str, *, data: str = f"{HERE}:table", **section: Any
) -> Trained:
    """Train a model for one epoch, whose last batch has 11 rows."""
    config = {
        "name": "custom",
        "seed": 3,
        "model": {"function": model},
        "data": {"function": data, "global_batch": 16, "shuffle": False},
        "train": {"epochs": 1, "check": "off", "loop": "custom", **section},
        "strategy": strategy,
    }
    result = notebook.train(config, runs_dir=folder / strategy["kind"])
    said = [event.message for event in read_events(result.run_dir / "events.jsonl") if isinstance(event, Notice)]
    return Trained(result.history, [np.asarray(weight) for weight in result.model.get_weights()], tuple(said))


def compare(folder: Path, model: str, **section: Any) -> Trained:
    """Check that two replicas have the numbers of one device, and return what they have."""
    one, two = train(folder, ONE, model, **section), train(folder, TWO, model, **section)
    found = deviations(two, one)
    assert max(found.values()) < 1e-5, (found, one.history, two.history)
    assert not [said for said in two.said if "differ" in said]
    return two


class Tracked(keras.Sequential):
    """A model that its step alone evaluates, with a metric that does not add up and means of whole batches."""

    def __init__(self) -> None:
        super().__init__([keras.Input((6,)), *net().layers])
        self.trackers = [keras.metrics.Mean(name="loss_mean"), keras.metrics.Mean(name="error")]
        self.largest = Largest()
        self.largest.additive = False


def with_metrics() -> keras.Model:
    return compiled(net(), metrics=[root_error, mean_error])


def tracked() -> keras.Model:
    model = Tracked()
    model.compile(optimizer=keras.optimizers.SGD(0.05))
    return model


def tracking_step(context: Any, batch: Any) -> dict[str, Any]:
    x, y = batch
    with tf.GradientTape() as tape:
        predictions = context.model(x, training=True)
        loss = context.average(tf.reduce_mean(tf.square(y - predictions), -1))
    context.apply(tape, loss)
    context.model.trackers[0].update_state(loss)
    context.model.trackers[1].update_state(tf.reduce_mean(tf.abs(y - predictions)))
    context.model.largest.update_state(y, predictions)
    return {"loss": loss}


def local_step(context: Any, batch: Any) -> dict[str, Any]:
    """Treat a replica's rows as the whole batch."""
    x, y = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - context.model(x, training=True)))
    context.apply(tape, loss)
    return {"local": loss}


def train_only() -> dict[str, Any]:
    return {"train": table()["train"]}


@pytest.mark.slow
def test_metrics_of_the_reference_step(tmp_path: Path) -> None:
    said = compare(tmp_path, f"{HERE}:with_metrics").said
    assert [one for one in said if "'root_error' does not add up" in one]


def test_metrics_of_a_step_without_evaluation(tmp_path: Path) -> None:
    compare(tmp_path, f"{HERE}:tracked", data=f"{HERE}:train_only", step=f"{HERE}:tracking_step")


def test_a_step_that_forgets_other_replicas_is_named(tmp_path: Path) -> None:
    said = train(tmp_path, TWO, f"{HERE}:tracked", data=f"{HERE}:train_only", step=f"{HERE}:local_step").said
    assert [one for one in said if "are means over rows, but replicas sum them" in one]
    assert [one for one in said if "the value 'local' that the training step returns is the sum" in one]
