"""Random state of a process of a run."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Index
from distlaunch.patches.tensorflow_shuffle import count_iterations

_SEED_STEP = 1_000_003  # between the seeds of two runs: more than the passes of one


def seed_of_pass(seed: int, number_of_pass: Index) -> tf.Tensor:
    """Combine seed and pass into one int64 scalar, such that neighbouring seeds share none with neighbouring passes."""
    return number_of_pass + tf.constant(seed, tf.int64) * _SEED_STEP


def seed_process(config: RunConfig) -> None:
    """Seed this process and reset the names of layers, so that all processes of the run draw the same numbers."""
    keras.utils.clear_session()  # names of layers are numbered on in a process that has built a model before
    keras.utils.set_random_seed(config.seed)
    count_iterations()
    if config.determinism:
        tf.config.experimental.enable_op_determinism()
        if not config.strategy.runs_tensorflow:  # but JAX, which has not started yet
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
