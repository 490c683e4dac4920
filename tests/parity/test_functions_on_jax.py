"""On JAX, Keras's functions compute what they compute on TensorFlow, also at kinks and from saturated probabilities.

As a script: prints the values and gradients of all cases on JAX.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.warm import run_module

POINTS = [-6.0, -3.0, -2.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.5, 3.0, 6.0]


def cases() -> dict[str, Callable[[Any], Any]]:
    """Return functions of the points, among which are their kinks."""
    import keras

    ops, activations, losses = keras.ops, keras.activations, keras.losses
    return {
        "absolute": ops.absolute,
        "abs": ops.abs,
        "maximum of a number": lambda x: ops.maximum(x, 0.0),
        "maximum of an array": lambda x: ops.maximum(ops.zeros((2, 1)), x),
        "maximum of itself": lambda x: ops.maximum(x, x),
        "minimum": lambda x: ops.minimum(x, 2.5),
        "clip": lambda x: ops.clip(x, -1.0, 2.5),
        "clip by arrays": lambda x: ops.clip(ops.zeros_like(x), x, 6.0 + 0 * x),
        "relu": activations.relu,
        "relu with a slope": lambda x: activations.relu(x, negative_slope=0.1, max_value=3.0, threshold=1.0),
        "relu6": activations.relu6,
        "leaky_relu": lambda x: activations.leaky_relu(x, negative_slope=0.3),
        "PReLU": lambda x: keras.layers.PReLU(alpha_initializer="ones")(x[None])[0],
        "elu": lambda x: activations.elu(x, alpha=2.0),
        "selu": activations.selu,
        "celu": lambda x: activations.celu(x, alpha=2.0),
        "hard_sigmoid": activations.hard_sigmoid,
        "hard_silu": activations.hard_silu,
        "hard_tanh": activations.hard_tanh,
        "hard_shrink": activations.hard_shrink,
        "soft_shrink": activations.soft_shrink,
        "threshold": lambda x: activations.threshold(x, 1.0, 0.0),
        "L1": keras.regularizers.L1(0.5),
        "L1L2": keras.regularizers.L1L2(0.5, 0.5),
        "mae": lambda x: losses.mean_absolute_error(ops.zeros_like(x), x),
        "mape": lambda x: losses.mean_absolute_percentage_error(ops.ones_like(x), x),
        "msle": lambda x: losses.mean_squared_logarithmic_error(ops.ones_like(x), x),
        "huber": lambda x: losses.huber(ops.zeros_like(x), x),
        "hinge": lambda x: losses.hinge(ops.ones_like(x), x),
        "squared_hinge": lambda x: losses.squared_hinge(ops.ones_like(x), x),
        "categorical_hinge": lambda x: losses.categorical_hinge(ops.eye(12), ops.stack([x] * 12)),
        "kl_divergence": lambda x: losses.kl_divergence(ops.ones_like(x), x),
        "reciprocal where it is finite": lambda x: ops.where(x > 0, ops.reciprocal(x), x),
        "rsqrt where it is finite": lambda x: ops.where(x > 0, ops.rsqrt(x), x),
        "normalized zeros": lambda x: ops.normalize(ops.stack([x, 0 * x])),
        "UnitNormalization": lambda x: keras.layers.UnitNormalization()(ops.reshape(ops.relu(x), (6, 2))),
        "cosine_similarity": lambda x: losses.cosine_similarity(ops.ones((2, 12)), ops.stack([x, 0 * x])),
    } | _losses()


def _losses() -> dict[str, Callable[[Any], Any]]:
    """Return losses of probabilities of 0 and 1, with and without logits that they may use."""
    import keras

    ops, losses = keras.ops, keras.losses

    def rows(x: Any) -> Any:
        return ops.reshape(100 * x, (4, 3))

    def one_hot() -> Any:
        return ops.one_hot(ops.arange(4) % 3, 3)

    def of(activation: str, loss: Any, labels: Callable[[], Any], **options: Any) -> Callable[[Any], Any]:
        activate = keras.activations.get(activation)
        return lambda x: loss(labels(), activate(rows(x)), **options)

    def numbers() -> Any:
        return ops.arange(4) % 3

    softmax = keras.layers.Softmax()
    categorical, sparse = losses.categorical_crossentropy, losses.sparse_categorical_crossentropy
    return {
        "softmax, categorical": of("softmax", categorical, one_hot, label_smoothing=0.1),
        "softmax, sparse": of("softmax", sparse, numbers),
        "softmax, sparse, ignored class": of("softmax", sparse, numbers, ignore_class=1),
        "softmax, said to be logits": of("softmax", sparse, numbers, from_logits=True),
        "softmax of a layer": lambda x: categorical(one_hot(), softmax(rows(x))),
        "sigmoid, binary": of("sigmoid", losses.binary_crossentropy, one_hot),
        "sigmoid, focal": of("sigmoid", losses.binary_focal_crossentropy, one_hot, apply_class_balancing=True),
        "sigmoid, categorical": of("sigmoid", categorical, one_hot),
        "sigmoid, sparse": of("sigmoid", sparse, numbers),
        "softplus, categorical": of("softplus", categorical, one_hot),
        "softplus, sparse": of("softplus", sparse, numbers),
        "softmax and more, sparse": lambda x: sparse(numbers(), 1.0 * ops.softmax(rows(x))),
        "sigmoid and more, binary": lambda x: losses.binary_crossentropy(one_hot(), 1.0 * ops.sigmoid(rows(x))),
        "reduced": lambda x: losses.CategoricalCrossentropy()(one_hot(), ops.softmax(rows(x))),
    }


@pytest.mark.usefixtures("virtual_devices")
def test_values_and_gradients_are_those_of_tensorflow() -> None:
    pytest.importorskip("jax")
    tf = pytest.importorskip("tensorflow")
    on_jax = json.loads(run_module("tests.parity.test_functions_on_jax", [], backend="jax").splitlines()[-1])
    found = {}
    for name, function in cases().items():
        x = tf.constant(POINTS)
        with tf.GradientTape() as tape:
            tape.watch(x)
            values = function(x)
        found[name] = values.numpy(), tape.gradient(values, x).numpy()
    assert on_jax.keys() == found.keys()
    for name, (values, gradients) in found.items():
        np.testing.assert_allclose(on_jax[name][0], values, rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(on_jax[name][1], gradients, rtol=1e-5, atol=1e-5, err_msg=name)


def test_functions_have_further_derivatives_and_keep_types() -> None:
    pytest.importorskip("jax")
    run_module("tests.parity.test_functions_on_jax", ["types"], backend="jax")


def main(words: list[str]) -> None:
    import jax
    import jax.numpy as jnp
    import keras

    from distlaunch.strategies.jax.keras_backend import compute_like_tensorflow

    if words:
        with_tensorflow = compute_like_tensorflow(_check_types)
        with_tensorflow(jax, jnp, keras.ops)
        return

    def differentiate(x: Any) -> dict[str, Any]:
        found = {}
        for name, function in cases().items():
            values, pullback = jax.vjp(function, x)
            found[name] = values, pullback(jnp.ones_like(values))[0]
        return found

    found = jax.jit(compute_like_tensorflow(differentiate))(jnp.asarray(POINTS))
    print(json.dumps(jax.tree.map(lambda each: each.tolist(), found)))


def _check_types(jax: Any, jnp: Any, ops: Any) -> None:
    half, whole = jnp.ones((3,), "bfloat16"), jnp.arange(3)
    assert ops.maximum(half, 0.5).dtype == ops.leaky_relu(half).dtype == ops.clip(half, 0, 2).dtype == "bfloat16"
    assert ops.maximum(half, jnp.ones((2, 1))).dtype == "float32"
    assert ops.selu(half).dtype == ops.celu(half).dtype == "bfloat16"
    assert ops.absolute(whole).dtype == ops.maximum(whole, 1).dtype == whole.dtype
    assert ops.absolute(jnp.asarray([3 + 4j]))[0] == 5
    assert jnp.isnan(ops.maximum(jnp.asarray(jnp.nan), 0.0))
    # forward over reverse, which some models use in their loss
    hessian = jax.hessian(lambda x: jnp.sum(ops.leaky_relu(x) ** 2 + ops.absolute(x) ** 3))(jnp.asarray([-1.0, 2.0]))
    assert jnp.allclose(hessian, jnp.diag(jnp.asarray([0.08 + 6, 2 + 12])))
    assert jax.vmap(ops.celu)(jnp.ones((2, 3))).shape == (2, 3)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
