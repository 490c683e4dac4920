"""`distlaunch verify` names a cause only when the trial without it is equal, and otherwise where a deviation begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_verify import CONFIG, verify

MINE = '''
import keras, numpy as np, tensorflow as tf

layers = keras.layers


def spectral(norm=False):
    """SpectralNormalization assigns its kernel in the forward pass, which JAX drops. The GRU draws nothing."""
    inputs = layers.Input((10,))
    x = layers.GRU(8, name="gru")(layers.Reshape((5, 2))(inputs))
    if norm:
        x = layers.BatchNormalization(name="norm")(x)
    x = layers.SpectralNormalization(layers.Dense(16, "relu", name="inner"), name="spectral")(x)
    return keras.Model(inputs, layers.Dense(3, name="last")(x))


class MyBatchNorm(layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=False):
        if not training:
            return x - self.mean
        mean = keras.ops.mean(x, 0)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x - mean


def own_norm(norm=False, rate=0.0):
    parts = [layers.Input((10,)), layers.Dense(16, "relu"), MyBatchNorm(), layers.Dropout(rate)]
    if norm:
        parts += [layers.Dense(16, "relu"), layers.BatchNormalization(name="norm")]
    return keras.Sequential([*parts, layers.Dense(3)])


class Replicated(layers.Layer):
    """Is wrong on replicas only: forwards or backwards."""

    def __init__(self, forwards, **kwargs):
        super().__init__(**kwargs)
        self.forwards = forwards

    def call(self, x):
        factor = 1 + 0.1 * (tf.distribute.get_strategy().num_replicas_in_sync - 1)
        if self.forwards:
            return factor * x
        return tf.custom_gradient(lambda x: (tf.identity(x), lambda gradient: factor * gradient))(x)


def wrong(forwards=True, rate=0.0):
    parts = [layers.Dense(16, "relu", name="a"), layers.Dropout(rate), Replicated(forwards, name="culprit")]
    return keras.Sequential([layers.Input((10,)), *parts, layers.Dense(16, name="b"), layers.Dense(3, name="c")])


class Gamma(layers.Layer):
    """Numbers of a kind that each replica draws like the first."""

    def __init__(self):
        super().__init__(name="gamma")
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        return x * keras.random.gamma(keras.ops.shape(x), 2.0, seed=self.seeds) if training else x


def gamma():
    return keras.Sequential([layers.Input((10,)), Gamma(), layers.Dense(3)])


def data():
    x = np.random.default_rng(0).normal(size=(89, 10)).astype("float32")
    return {"train": (x, (x[:, 0] > 0) + (x[:, 1] > 0).astype("int64"))}
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def reasons(project: Path, *settings: str, kinds: str = "mirrored") -> dict[str, list[str]]:
    """What is said of each strategy that differs."""
    code, rows = verify(project, *settings, kinds=kinds)
    differing = {kind: row["reasons"] for kind, row in rows.items() if row["verdict"] == "differs"}
    assert code == (1 if differing else 0)
    assert {row["verdict"] for row in rows.values()} <= {"equal", "differs"}, rows
    return differing


@pytest.mark.slow  # in CI tests/unit/test_judgement.py and test_layer_facts.py have its parts
def test_the_layer_is_named_whose_output_leaves_first(project: Path) -> None:
    (reason,) = reasons(project, "model.function=mine.py:wrong")["mirrored"]
    assert reason.startswith("unexplained: the loss and the gradients")
    assert "the first to deviate is the output of culprit, in step 1" in reason


@pytest.mark.slow
def test_random_layers_are_not_named_for_what_they_have_not_done(project: Path) -> None:
    settings = ("model.function=mine.py:wrong", "model.args={forwards: false, rate: 0.3}")
    (reason,) = reasons(project, *settings, kinds="mirrored,dtensor")["mirrored"]
    assert reason.startswith("unexplained")
    assert "the first to deviate is the gradient of sequential/a/bias, in step 1" in reason
    assert "random" not in reason


@pytest.mark.slow
def test_random_layers_are_named_for_what_they_have_done(project: Path) -> None:
    (reason,) = reasons(project, "model.function=mine.py:gamma")["mirrored"]
    assert reason.startswith("random layer gamma: other random numbers than on one device")


@pytest.mark.slow
def test_spectral_normalization_on_jax(project: Path) -> None:
    """One device on TensorFlow and on JAX differ by themselves; no layer of the model is a known cause."""
    pytest.importorskip("jax")
    found = reasons(project, "model.function=mine.py:spectral", kinds="mirrored,jax")
    (reason,) = found.pop("jax")
    assert reason.startswith("unexplained")
    assert "the first to deviate is the gradient of spectral/inner/kernel" in reason
    assert not found


@pytest.mark.slow
def test_only_what_is_to_blame_is_named(project: Path) -> None:
    pytest.importorskip("jax")
    settings = ("model.function=mine.py:spectral", "model.args.norm=true")
    found = reasons(project, *settings, kinds="mirrored,jax")
    (reason,) = found["mirrored"]
    assert reason.startswith("BatchNormalization norm")
    (reason,) = found["jax"]
    assert "of spectral/inner/kernel" in reason
    assert "BatchNormalization" not in reason


@pytest.mark.slow
def test_a_normalisation_of_ones_own(project: Path) -> None:
    (reason,) = reasons(project, "model.function=mine.py:own_norm")["mirrored"]
    assert reason.startswith("class MyBatchNorm: statistics of each replica's own rows")


@pytest.mark.slow
def test_two_causes_together_without_a_third_that_is_none(project: Path) -> None:
    settings = ("model.function=mine.py:own_norm", "model.args={norm: true, rate: 0.3}")
    first, second = reasons(project, *settings)["mirrored"]
    assert first.startswith("BatchNormalization norm")
    assert second.startswith("class MyBatchNorm")
