"""TensorFlow's random numbers on JAX, so that dropout masks are the same as under the other strategies.

This is Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), seeded and converted to
floats as in `tf.random.stateless_uniform` and `stateless_normal`. Each number depends only on its position, so the
compiler can split a draw over a mesh in any way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # from the golden ratio and the square root of 3, as in the paper
# TensorFlow's constants for deriving a key and a counter from a seed
_SCRAMBLING_KEY = (0x3EC8F720, 0x02461E29)
_ROUNDS, _LANES = 10, 4  # each count, a value of the counter, gives four 32-bit words
_ROUNDS_TOGETHER = 2
"""Rounds in each iteration of a loop on CPUs. More take no less time, and longer to compile."""
_INT32_MAX = 2**31 - 1
# for each dtype: an integer type of the same size, the number of bits of the fraction, and the bit pattern of 1.0
_LAYOUTS = {
    "float32": (jnp.uint32, 23, 0x3F800000),
    "float16": (jnp.uint16, 10, 0x3C00),
    "bfloat16": (jnp.uint16, 7, 0x3F80),
}


def is_supported(dtype: Any) -> bool:
    """Return whether numbers of this dtype can be drawn here."""
    return jnp.dtype(dtype).name in _LAYOUTS


def uniform(seed: jax.Array, shape: Sequence[int], dtype: Any = "float32") -> jax.Array:
    """Return numbers in [0, 1), equal to `tf.random.stateless_uniform` bit by bit.

    Args:
        seed: state of a Keras `SeedGenerator`, shape [2].
        dtype: a dtype that `is_supported`.
    """
    return _interleave([_unit(word, dtype) for word in _words(seed, shape)], shape)


def normal(seed: jax.Array, shape: Sequence[int], dtype: Any = "float32") -> jax.Array:
    """Return standard normal numbers, equal to `tf.random.stateless_normal` up to rounding; see `uniform`."""
    first, second, third, fourth = (_unit(word, "float32") for word in _words(seed, shape))
    # in float32 for every dtype, as in TensorFlow
    values = [*_box_muller(first, second), *_box_muller(third, fourth)]
    return _interleave([value.astype(dtype) for value in values], shape)


def _box_muller(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    # at least 1e-7, as in TensorFlow, because the logarithm of 0 is infinite
    radius = jnp.sqrt(-2.0 * jnp.log(jnp.maximum(first, jnp.float32(1e-7))))
    angle = jnp.float32(2 * math.pi) * second
    return jnp.sin(angle) * radius, jnp.cos(angle) * radius


def _unit(word: jax.Array, dtype: Any) -> jax.Array:
    """Return a number in [0, 1): the lower bits are used as the fraction of a number in [1, 2), and 1 is subtracted."""
    integer, bits, one = _LAYOUTS[jnp.dtype(dtype).name]
    fraction = word.astype(integer) & integer((1 << bits) - 1)
    return lax.bitcast_convert_type(fraction | integer(one), jnp.dtype(dtype)) - jnp.ones((), dtype)


def _words(seed: jax.Array, shape: Sequence[int]) -> Words:
    """Return the four words of each count that the draw needs.

    Each array has the shape [..., last / 4] if the last dimension is divisible by 4, and is flat otherwise.
    """
    key, high = _key_and_counter(seed)
    # above 2**32 counts (64 GiB of floats), numbers would repeat
    return _philox((_counts(shape), jnp.uint32(0), *high), key)


def _counts(shape: Sequence[int]) -> jax.Array:
    """Return consecutive numbers, one for each four entries; computed without a reshape, which a mesh cannot split."""
    if not _is_divisible(shape):
        return lax.iota(jnp.uint32, -(-math.prod(shape) // _LANES))
    grid = [*shape[:-1], shape[-1] // _LANES]
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    parts = [
        lax.broadcasted_iota(jnp.uint32, grid, axis) * np.uint32(stride % 2**32) for axis, stride in enumerate(strides)
    ]
    return sum(parts[1:], start=parts[0])


def _interleave(lanes: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
    """Return the four values of each count one after the other.

    They are selected by position, which is far faster in XLA than stacking.
    """
    grid = [*lanes[0].shape, _LANES]
    lane = lax.broadcasted_iota(jnp.uint32, grid, len(grid) - 1)
    first, second, third, fourth = (jnp.broadcast_to(value[..., None], grid) for value in lanes)
    values = jnp.where(lane < 2, jnp.where(lane == 0, first, second), jnp.where(lane == 2, third, fourth))
    return values.reshape(shape) if _is_divisible(shape) else values.reshape(-1)[: math.prod(shape)].reshape(shape)


def _is_divisible(shape: Sequence[int]) -> bool:
    return len(shape) > 0 and shape[-1] % _LANES == 0


def _key_and_counter(seed: jax.Array) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the key, and the upper half of the counter, that TensorFlow derives from a seed."""
    low, high = jnp.asarray(seed).astype(jnp.uint32) % jnp.uint32(_INT32_MAX - 1)  # as Keras does on TensorFlow
    zero = jnp.zeros((), jnp.uint32)
    mixed = _philox((low, zero, high, zero), tuple(map(jnp.uint32, _SCRAMBLING_KEY)))
    return mixed[:2], mixed[2:]


def _philox(counter: Any, key: Any) -> Words:
    def make_round(number: Any, counter: Any) -> Any:
        low0, high0 = _product(_MULTIPLIERS[0], counter[0])
        low1, high1 = _product(_MULTIPLIERS[1], counter[2])
        number = jnp.asarray(number, jnp.uint32)
        keys = [part + number * jnp.uint32(step) for part, step in zip(key, _KEY_STEPS, strict=True)]
        return high1 ^ counter[1] ^ keys[0], low1, high0 ^ counter[3] ^ keys[1], low0

    # On CPUs, XLA would compute all rounds twice, for the forward and the backward pass, and compile them within a loop
    # of steps for 5 s per layer (JAX 0.10). A loop is computed once. On GPUs, each of its rounds would be a kernel.
    unroll = _ROUNDS_TOGETHER if jax.default_backend() == "cpu" else _ROUNDS
    shape = counter[0].shape
    return lax.fori_loop(
        0, _ROUNDS, make_round, tuple(jnp.broadcast_to(each, shape) for each in counter), unroll=unroll
    )


def _product(constant: int, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the lower and upper word of a product, computed from 16-bit halves, as JAX has no 64-bit integers."""
    half = jnp.uint32(0xFFFF)
    c_low, c_high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    low, high = value & half, value >> 16
    middle = c_high * low + ((c_low * low) >> 16)
    other = c_low * high + (middle & half)
    return jnp.uint32(constant) * value, c_high * high + (middle >> 16) + (other >> 16)
