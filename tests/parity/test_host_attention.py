"""A model with attention is built on the host without the flash attention of GPUs; its steps still use it.

As a script: builds and trains such a model on JAX, as if the devices supported flash attention. Prints, for building
and for training, which implementations Keras has asked JAX for.
"""

from __future__ import annotations

import json
import sys
import tempfile

import pytest

from tests.warm import run_module

CROSS_ENTROPY = {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}}


@pytest.mark.slow
def test_building_does_not_ask_for_flash_attention() -> None:
    pytest.importorskip("jax")
    asked = json.loads(run_module("tests.parity.test_host_attention", [], backend="jax").splitlines()[-1])
    assert set(asked["building"]) == {"xla"}
    # the stand-in fails, so that Keras then asks for `xla`
    assert asked["training"][:2] == ["cudnn", "xla"]


def model():
    import keras

    layers = keras.layers
    inputs = layers.Input((8,), dtype="int32")
    x = layers.Embedding(20, 16)(inputs)
    # one layer that leaves the choice to Keras, and one that insists
    x = layers.MultiHeadAttention(2, 8)(x, x)
    x = layers.MultiHeadAttention(2, 8, flash_attention=True)(x, x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def data():
    import numpy as np

    random = np.random.default_rng(0)
    return random.integers(0, 20, (32, 8)).astype(np.int32), random.integers(0, 2, 32).astype(np.int32)


def main() -> None:
    import jax
    import keras.src.backend.jax.nn as keras_nn

    from distlaunch.base.process import Process
    from distlaunch.base.run_dir import RunDir
    from distlaunch.cluster.spec import Task
    from distlaunch.config.run import RunConfig
    from distlaunch.strategies.coordination import Vote
    from distlaunch.training.session import Session

    attention = jax.nn.dot_product_attention
    asked: list[str] = []

    def ask(*args, implementation, **kwargs):
        asked.append(implementation)
        if implementation == "cudnn":
            raise NotImplementedError
        return attention(*args, implementation=implementation, **kwargs)

    jax.nn.dot_product_attention = ask
    keras_nn._can_use_flash_attention = lambda *args, **kwargs: True
    config = RunConfig.model_validate({
        "model": {"function": f"{__file__}:model"},
        "data": {"function": f"{__file__}:data", "global_batch": 16},
        "compile": {"optimizer": "adam", "loss": CROSS_ENTROPY},
        "precision": "mixed_bfloat16",
        "validation": None,
        "strategy": {"kind": "jax", "mesh": {"batch": 1}},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        process = Process(lambda event: None, lambda: False)
        session = Session.build(config, RunDir(folder), Task("worker", 0), process)
        building = list(asked)
        session.program.set_train_data(session.train.training_source(0, 0, ends_visible=False))
        session.program.run_steps(1, Vote())
        print(json.dumps({"building": building, "training": asked[len(building) :]}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
