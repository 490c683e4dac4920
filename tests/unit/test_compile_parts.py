"""Parts of `compile` that the config names, and those that the model was compiled with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

pytest.importorskip("tensorflow")

from distlaunch.base.errors import ConfigError
from distlaunch.checkpoints.optimizer_changes import describe_optimizers, loss_text, optimizers_text
from distlaunch.config.run import Compile
from distlaunch.training.build import compile_model
from distlaunch.training.precision import dtype_policy_scope

pytestmark = pytest.mark.usefixtures("virtual_devices")


def network() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])


def own(model: keras.Model | None = None, **more: Any) -> keras.Model:
    model = model or network()
    model.compile(keras.optimizers.SGD(0.25, momentum=0.5), loss="mae", metrics=["mse"], loss_weights=[2.0], **more)
    return model


def compiled(model: keras.Model, **section: Any) -> dict[str, Any]:
    """Return what a model says of itself after a step."""
    compile_model(model, Compile.model_validate(section))
    logs = model.evaluate(np.ones((4, 3)), np.ones((4, 1)), verbose=0, return_dict=True)
    settings = {"rate": float(model.optimizer.learning_rate.numpy()), "class": type(model.optimizer).__name__}
    return {**settings, "loss": loss_text(model.loss), "logs": sorted(logs)}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {"class": "SGD", "rate": 0.25, "loss": "mae", "logs": ["loss", "mse"]}),
        ({"metrics": ["mape"]}, {"class": "SGD", "rate": 0.25, "loss": "mae", "logs": ["loss", "mape"]}),
        ({"metrics": []}, {"class": "SGD", "rate": 0.25, "loss": "mae", "logs": ["loss"]}),
        ({"loss": "mse"}, {"class": "SGD", "rate": 0.25, "loss": "MeanSquaredError", "logs": ["loss", "mse"]}),
        (
            {"optimizer": {"name": "Lion", "args": {"learning_rate": 0.125}}},
            {"class": "Lion", "rate": 0.125, "loss": "mae", "logs": ["loss", "mse"]},
        ),
        (
            {"optimizer": {"args": {"learning_rate": 0.125}}},
            {"class": "SGD", "rate": 0.125, "loss": "mae", "logs": ["loss", "mse"]},
        ),
    ],
)
def test_parts_that_are_named_replace_the_models_own(section: dict[str, Any], expected: dict[str, Any]) -> None:
    assert compiled(own(), **section) == expected


def test_arguments_of_the_models_own_optimizer_keep_the_others() -> None:
    model = own()
    compile_model(model, Compile.model_validate({"optimizer": {"args": {"learning_rate": 0.75, "nesterov": True}}}))
    optimizer: Any = model.optimizer
    assert (optimizer.momentum, optimizer.nesterov, float(optimizer.learning_rate.numpy())) == (0.5, True, 0.75)


@pytest.mark.parametrize("wraps", [False, True])
def test_arguments_of_the_models_own_optimizer_keep_what_is_not_decayed(wraps: bool) -> None:
    model = network()
    adamw = keras.optimizers.AdamW(1.0, weight_decay=0.5)
    kernel, bias = model.trainable_variables
    adamw.exclude_from_weight_decay(var_list=[kernel], var_names=["no such name"])
    model.compile(keras.optimizers.LossScaleOptimizer(adamw) if wraps else adamw, "mse")
    compile_model(model, Compile.model_validate({"optimizer": {"args": {"learning_rate": 0.5}}}))
    made: Any = model.optimizer
    made = made.inner_optimizer if wraps else made
    assert made is not adamw
    before, _ = kernel.numpy(), bias.assign([2.0])
    made.apply([np.zeros((3, 1), np.float32), np.zeros(1, np.float32)], [kernel, bias])
    assert (kernel.numpy() == before).all()
    assert bias.numpy() == pytest.approx(1.5)


@pytest.mark.parametrize("scales", [False, True])
def test_the_models_own_choice_of_loss_scaling_stays(scales: bool) -> None:
    with dtype_policy_scope("mixed_float16"):
        model = network()
    model.compile("sgd", "mse", auto_scale_loss=scales)
    compile_model(model, Compile.model_validate({"metrics": ["mae"]}))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == scales


def test_a_model_that_is_not_compiled_gets_kerass_default() -> None:
    found = compiled(network(), loss="mse")
    assert found == {"class": "RMSprop", "rate": pytest.approx(0.001), "loss": "MeanSquaredError", "logs": ["loss"]}


class Gan(keras.Model):
    """Compiled with arguments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile(loss="mse")
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer


class Wrapping(keras.Model):
    """Passes on what it is given, and keeps the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compile(self, optimizer: Any = "adam", **more: Any) -> None:
        super().compile(optimizer, **more)
        self.kept = self.optimizer


def test_a_compile_of_the_models_own() -> None:
    gan = Gan()
    gan.compile(keras.optimizers.Adam(), keras.optimizers.SGD())
    first, second = gan.d_optimizer, gan.g_optimizer
    assert compiled(gan, metrics=["mae"])["logs"] == ["loss", "mae"]
    assert (gan.d_optimizer, gan.g_optimizer) == (first, second)
    words = r"compile\(\) of Gan takes d_optimizer, g_optimizer, but not optimizer; set it in the model's function"
    with pytest.raises(ConfigError, match=words):
        compiled(gan, optimizer="sgd")
    wrapping: Any = own(Wrapping())
    assert compiled(wrapping, optimizer="sgd")["logs"] == ["loss", "mse"]
    assert wrapping.kept is wrapping.optimizer


@pytest.mark.parametrize(
    ("model", "section", "words"),
    [
        (
            network,
            {"optimizer": {"args": {"learning_rate": 0.1}}},
            "missing: the model's function does not compile the model",
        ),
        (own, {"optimizer": {"args": {"learnin_rate": 0.1}}}, "got 'learnin_rate', which SGD does not have; it has"),
        (own, {"optimizer": {"args": {"learning_rate": "x"}}}, "SGD: "),
    ],
)
def test_what_cannot_be_merged_is_said(model: Any, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compile_model(model(), Compile.model_validate(section))


def test_the_optimizer_in_words() -> None:
    model = own()
    decay = keras.optimizers.schedules.InverseTimeDecay(0.5, 10, 0.75)
    model.extra = [keras.optimizers.Adam(decay)]
    described = describe_optimizers(model)
    assert optimizers_text(described, with_rates=False) == "SGD + Adam"
    rate = "InverseTimeDecay(initial_learning_rate=0.5, decay_steps=10, decay_rate=0.75, staircase=False)"
    assert optimizers_text(described, with_rates=True) == f"SGD, learning rate 0.25 + Adam, learning rate {rate}"
    assert loss_text({"a": "mse", "b": keras.losses.Huber()}) == "a: mse, b: Huber"


class Slowed(keras.optimizers.SGD):
    """An optimizer of the user's that cannot be made again from `get_config`."""

    def __init__(self, slowness: float = 1.0, **more: Any) -> None:
        super().__init__(**more)
        self.slowness = slowness


def test_an_argument_that_the_models_optimizer_would_lose_is_an_error() -> None:
    model = network()
    model.compile(Slowed(2.0, learning_rate=0.5), loss="mae")
    section = {"optimizer": {"args": {"learning_rate": 0.125}}}
    with pytest.raises(ConfigError, match=r"get_config\(\) leaves out 'slowness'"):
        compile_model(model, Compile.model_validate(section))
    model.compile(Slowed(learning_rate=0.5), loss="mae")
    assert compiled(model, **section)["rate"] == 0.125
