"""Random seeds of a run and of its processes."""

from __future__ import annotations

import os
from typing import Any

import keras

from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Index
from distlaunch.patches import keras_without_tensorflow
from distlaunch.patches.tensorflow_late import tf, when_imported
from distlaunch.patches.tensorflow_shuffle import count_iterations

_SEED_STEP = 1_000_003
"""Distance between the shuffle seeds of two runs whose `seed` differs by 1; larger than any number of passes."""

DETERMINISTIC_OPS = "--xla_gpu_deterministic_ops=true"


def shuffle_numbers(numbers: tf.Tensor, seed: Any) -> tf.Tensor:
    """Return a vector of numbers in an order that depends only on its length and on `seed`, two int64 integers."""
    random: Any = tf.random
    return random.experimental.stateless_shuffle(numbers, seed=seed)


def seed_of_pass(seed: int, number_of_pass: Index) -> tf.Tensor:
    """Combine seed and pass into one int64 scalar that differs for all neighboring seeds and passes."""
    return number_of_pass + tf.constant(seed, tf.int64) * _SEED_STEP


def seed_process(config: RunConfig) -> None:
    """Seed this process and reset the names of layers, so that all processes of the run draw the same numbers."""
    keras.utils.clear_session()  # resets the numbers in layers' names, in case this process has built a model before
    if not config.strategy.runs_tensorflow:
        keras_without_tensorflow.install()
    keras.utils.set_random_seed(config.seed)
    _late_seed.value = config.seed
    when_imported(_seed_tensorflow)
    if config.determinism:
        when_imported(_make_deterministic)
        if not config.strategy.runs_tensorflow:  # JAX reads the variable when it starts
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC_OPS}".strip()


class _LateSeed:
    """The run's seed, for a later import of TensorFlow."""

    value = 0


_late_seed = _LateSeed()


def _seed_tensorflow() -> None:
    tf.random.set_seed(_late_seed.value)
    count_iterations()


def _make_deterministic() -> None:
    tf.config.experimental.enable_op_determinism()
