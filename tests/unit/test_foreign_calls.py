"""A layer, loss or metric that computes with TensorFlow or NumPy is named where JAX cannot trace it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

CASES = (
    ("Sine()(i)", "None", "layer 'sine' (Sine) (given.py:9) computes with TensorFlow"),
    ("Round()(i)", "None", "layer 'round' (Round) (given.py:13) computes with NumPy"),
    ("i", "squares", "loss 'squares' (LossFunctionWrapper) (given.py:16) computes with TensorFlow"),
)
"""A model and its loss, and how the run names what cannot be traced."""


def test_they_are_named(tmp_path: Path) -> None:
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
import sys
import jax
sys.path.insert(0, {str(tmp_path)!r})
from given import *
from distlaunch.base.errors import ConfigError
from distlaunch.strategies.jax.keras_backend import name_foreign_calls
for make, loss in {[(expression, loss) for expression, loss, _ in CASES]!r}:
    try:
        with name_foreign_calls():
            i = layers.Input((3,))
            model = keras.Model(i, eval(make))
            model.compile("sgd", eval(loss))
            jax.jit(lambda x: model.compute_loss(x, x, x))(np.ones((2, 3), "float32"))
    except ConfigError as error:
        print(error.problems[0].dotted, error.problems[0].message)
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
    told = result.stdout.splitlines()
    assert len(told) == len(CASES), result.stdout + result.stderr
    for line, (_, _, expected) in zip(told, CASES, strict=True):
        assert line.startswith(f"model.function {expected}")
