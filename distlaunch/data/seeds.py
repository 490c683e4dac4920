"""Random state of a process of a run."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from distlaunch.config.run import RunConfig
from distlaunch.patches.tensorflow_shuffle import count_iterations

_SEED_STEP = 1_000_003  # between the seeds of two runs: more than the passes of one


def seed_of_pass(seed: int, number_of_pass: tf.Tensor) -> tf.Tensor:
    """One number of two, an int64 scalar: seeds that are neighbours must not share those of neighbouring passes."""
    return number_of_pass + tf.constant(seed, tf.int64) * _SEED_STEP


def seed_process(config: RunConfig) -> None:
    """Begins a run in this process: the same names of layers and the same random numbers in each of its processes."""
    keras.utils.clear_session()  # names of layers are numbered on in a process that has built a model before
    keras.utils.set_random_seed(config.seed)
    count_iterations()
    if config.determinism:
        tf.config.experimental.enable_op_determinism()
        if not config.strategy.runs_tensorflow:  # but JAX, which has not started yet
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
