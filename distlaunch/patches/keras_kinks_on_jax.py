"""Gives Keras's functions TensorFlow's gradients on JAX, at points where a function has no derivative.

Frameworks choose the gradient of such a point. For example, that of |x| at 0 is 0 on TensorFlow and 1 on JAX. Models
meet these points exactly: biases start at 0, and so are sums over the black border of an image.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from distlaunch.patches.symbols import Patch, Symbol, internal, replaced_attributes

_NUMPY, _MATH, _NN = (f"keras.src.backend.jax.{name}" for name in ("numpy", "math", "nn"))
_ABSOLUTE = Symbol(f"{_NUMPY}.absolute", "(x)")
_MAXIMUM = Symbol(f"{_NUMPY}.maximum", "(x1, x2)")
_MINIMUM = Symbol(f"{_NUMPY}.minimum", "(x1, x2)")
_CLIP = Symbol(f"{_NUMPY}.clip", "(x, x_min, x_max)")
_RECIPROCAL = Symbol(f"{_NUMPY}.reciprocal", "(x)")
_RSQRT = Symbol(f"{_MATH}.rsqrt", "(x)")
_LEAKY_RELU = Symbol(f"{_NN}.leaky_relu", "(x, negative_slope=0.2)")
_SELU = Symbol(f"{_NN}.selu", "(x)")
_CELU = Symbol(f"{_NN}.celu", "(x, alpha=1.0)")
# of "Self-Normalizing Neural Networks" (Klambauer et al., 2017), with the digits that TensorFlow and JAX use
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

PATCH = Patch(
    symbols=(_ABSOLUTE, _MAXIMUM, _MINIMUM, _CLIP, _RECIPROCAL, _RSQRT, _LEAKY_RELU, _SELU, _CELU),
    why="TensorFlow and JAX choose different gradients where a function has a kink, so the first steps of a model with "
    "L1 on its biases, or with LeakyReLU after the black border of an image, differ by more than rounding. And the "
    "gradients of normalized vectors are NaN on JAX if one of them is 0: 0 from outside times infinity.",
    until="Keras's functions have the same gradients at kinks on every backend.",
)


@contextlib.contextmanager
def gradients_of_tensorflow() -> Iterator[None]:
    """Trace Keras's functions in this context with TensorFlow's gradients at kinks. Values do not change."""
    PATCH.check()
    with replaced_attributes(
        (internal(symbol.path.rpartition(".")[0]), symbol.path.rpartition(".")[2], _for_floats(symbol.get(), function))
        for symbol, function in _FUNCTIONS.items()
    ):
        yield


def _for_floats(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `function` for real numbers, and `original` for anything else."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            arrays = [jnp.asarray(each) for each in args]
        except (TypeError, ValueError):  # such as a sparse array, or no limit at all
            return original(*args, **kwargs)
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.floating):
            return original(*args, **kwargs)
        return function(*(each.astype(dtype) for each in arrays), **kwargs)

    return chosen


def _differentiated(function: Callable[..., Any], tangent: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with another derivative.

    Args:
        tangent: returns the tangent of the result for the result, the arguments and their tangents.
    """
    made = jax.custom_jvp(function)

    def jvp(primals: Any, tangents: Any) -> Any:
        value = made(*primals)
        return value, tangent(value, *primals, *tangents)

    made.defjvp(jvp)
    return made


_absolute = _differentiated(jnp.absolute, lambda y, x, t: t * jnp.sign(x))
_maximum = _differentiated(jnp.maximum, lambda y, x1, x2, t1, t2: jnp.where(x1 >= x2, t1, t2))
_minimum = _differentiated(jnp.minimum, lambda y, x1, x2, t1, t2: jnp.where(x1 <= x2, t1, t2))
_clip = _differentiated(
    jnp.clip, lambda y, x, low, high, t, t_low, t_high: jnp.where(x < low, t_low, jnp.where(x > high, t_high, t))
)
_reciprocal = _differentiated(jnp.reciprocal, lambda y, x, t: t * _where_finite(y, -y * y))
_rsqrt = _differentiated(jax.lax.rsqrt, lambda y, x, t: t * _where_finite(y, -0.5 * (y / x)))


def _where_finite(value: Any, derivative: Any) -> Any:
    """Return 0 where the value is not finite. TensorFlow's gradient is 0 there if that from outside is 0."""
    return jnp.where(jnp.isfinite(value), derivative, jnp.zeros_like(derivative))


def _leaky_relu(x: Any, negative_slope: Any = 0.2) -> Any:
    return jnp.where(x > 0, x, negative_slope * x)


def _selu(x: Any) -> Any:
    # the inner choice keeps the exponential finite
    return _SELU_SCALE * jnp.where(x >= 0, x, _SELU_ALPHA * jnp.expm1(jnp.where(x >= 0, 0.0, x)))


def _celu(x: Any, alpha: Any = 1.0) -> Any:
    zero = jnp.zeros((), x.dtype)
    return _maximum(x, zero) + alpha * jnp.expm1(_minimum(x, zero) / alpha)


_FUNCTIONS: dict[Symbol, Callable[..., Any]] = {
    _ABSOLUTE: _absolute,
    _MAXIMUM: _maximum,
    _MINIMUM: _minimum,
    _CLIP: _clip,
    _RECIPROCAL: _reciprocal,
    _RSQRT: _rsqrt,
    _LEAKY_RELU: _leaky_relu,
    _SELU: _selu,
    _CELU: _celu,
}
