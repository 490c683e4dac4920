"""Losses and metrics that are functions of the user's."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from distlaunch.base.errors import ConfigError
from distlaunch.config.run import Component
from distlaunch.training.build import component

pytestmark = pytest.mark.usefixtures("virtual_devices")

MINE = """
import keras

def plain(target, output):
    return keras.ops.mean(keras.ops.abs(target - output), -1)

def scaled(y_true, y_pred, factor=1.0):
    return plain(y_true, y_pred) * factor

def of_factor(factor):
    return lambda y_true, y_pred: plain(y_true, y_pred) * factor

def made():
    return keras.losses.MeanAbsoluteError()
"""


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("plain", {}, 2),
        ("scaled", {}, 2),
        ("scaled", {"factor": 3}, 6),
        ("of_factor", {"factor": 3}, 6),
        ("made", {}, 2),
    ],
)
def test_a_loss_is_the_function_or_what_it_makes(name: str, args: dict, expected: float, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    loss = component(Component(name=f"{tmp_path}/mine.py:{name}", args=args), "losses", ("compile", "loss"))
    assert float(np.mean(loss(np.zeros((4, 2)), np.full((4, 2), 2.0)))) == expected


def test_a_schedule_that_cannot_be_made_is_a_mistake_in_its_argument() -> None:
    given = Component(name="SGD", args={"learning_rate": {"name": "CosineDecay", "args": {"decay_steps": 5}}})
    with pytest.raises(ConfigError, match=r"CosineDecay: .*missing.*initial_learning_rate") as caught:
        component(given, "optimizers", ("compile", "optimizer"))
    assert caught.value.problems[0].dotted == "compile.optimizer.args.learning_rate"


def test_a_whole_number_is_a_learning_rate() -> None:
    made = component(Component(name="SGD", args={"learning_rate": 3}), "optimizers", ("compile", "optimizer"))
    assert float(made.learning_rate) == 3.0
    with pytest.raises(ConfigError, match="learning_rate"):
        component(Component(name="SGD", args={"learning_rate": True}), "optimizers", ("compile", "optimizer"))


@pytest.mark.parametrize(
    ("name", "args", "at", "expected"),
    [
        ("ExponentialDecay", {"initial_learning_rate": 1, "decay_steps": 10, "decay_rate": 0.25}, 5, 0.5),
        ("CosineDecay", {"initial_learning_rate": 0, "warmup_target": 1, "warmup_steps": 10, "decay_steps": 9}, 5, 0.5),
        ("PiecewiseConstantDecay", {"boundaries": [10, 20], "values": [1, 0.5, 0]}, 15, 0.5),
    ],
)
def test_whole_numbers_are_rates_of_a_schedule(name: str, args: dict, at: int, expected: float) -> None:
    given = Component(name="SGD", args={"learning_rate": {"name": name, "args": args}})
    made = component(given, "optimizers", ("compile", "optimizer"))
    made.iterations.assign(at)
    assert float(made.learning_rate) == pytest.approx(expected)


def test_a_name_that_is_no_class_is_refused() -> None:
    # Keras's `get` would return another metric, without the arguments
    with pytest.raises(ConfigError, match=r"no class of keras\.metrics"):
        component(Component(name="accuracy", args={"threshold": 0.3}), "metrics", ("compile", "metrics"))
