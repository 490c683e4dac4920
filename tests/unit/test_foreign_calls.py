"""A layer, loss or metric that computes with TensorFlow or NumPy is named where JAX cannot trace it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

CASES = {
    "layer": ("Sine()(i)", "None", "layer 'sine' (Sine) (given.py:9) computes with TensorFlow"),
    "numpy": ("Round()(i)", "None", "layer 'round' (Round) (given.py:13) computes with NumPy"),
    "loss": ("i", "squares", "loss 'squares' (LossFunctionWrapper) (given.py:16) computes with TensorFlow"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_named(name: str, tmp_path) -> None:
    expression, loss, expected = CASES[name]
    (tmp_path / "given.py").write_text(
        textwrap.dedent(
            """\
            import keras
            import numpy as np
            import tensorflow as tf
            from keras import layers


            class Sine(layers.Layer):
                def call(self, x):
                    return tf.math.sin(x)

            class Round(layers.Layer):
                def call(self, x):
                    return np.asarray(x)

            def squares(y, p):
                return tf.reduce_mean(tf.square(y - p), -1)
            """
        )
    )
    script = f"""
import jax, keras, sys
sys.path.insert(0, {str(tmp_path)!r})
from given import *
from distlaunch.base.errors import ConfigError
from distlaunch.strategies.jax.foreign_calls import foreign_calls_named
try:
    with foreign_calls_named():
        i = layers.Input((3,))
        model = keras.Model(i, {expression})
        model.compile("sgd", {loss})
        model.stateless_compute_loss and jax.jit(lambda x: model.compute_loss(x, x, x))(np.ones((2, 3), "float32"))
except ConfigError as error:
    print(error.problems[0].key, error.problems[0].message)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"KERAS_BACKEND": "jax", "PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    assert expected in result.stdout, result.stdout + result.stderr
    assert "('model', 'function')" in result.stdout
