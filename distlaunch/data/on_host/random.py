"""TensorFlow's random numbers in NumPy, so that JAX starts from the weights and orders of the other strategies.

This is Philox 4x32-10, as in `strategies/jax/random.py`, with the conversions of TensorFlow's kernels for the CPU.
TensorFlow calls the C library for logarithm, sine and cosine. This module does too, by way of complex numbers, because
NumPy's own functions round real numbers differently.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from distlaunch.cluster.cores import num_cores

Words = list[np.ndarray]
"""Four 32-bit words for each count, a value of Philox's counter; arrays of uint64."""

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_SCRAMBLING_KEY = (0x3EC8F720, 0x02461E29)
_ROUNDS, _LANES = 10, 4
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_BLOCK = 1 << 14
"""Number of counts that are computed together, so that the arrays of all rounds stay in a core's cache."""
_EXACT = 1 << 20
"""Largest draw of normal numbers that is equal to TensorFlow's bit by bit.

In a larger draw, one number in 400 differs by rounding, but the draw takes half of the processor time, and uses all
cores.
"""
_AT_ONCE = 1 << 18
"""Number of exchanges of a shuffle that are drawn together, which limits the memory for Python's numbers."""
_RESERVED = 256
"""Number of counts that TensorFlow reserves for four truncated normal numbers, which may need several attempts."""
_LIMIT = 2.0
"""Truncated normal numbers are less than this many standard deviations from the mean."""
_SMALLEST = 1e-7
"""Smallest number whose logarithm is taken, as in TensorFlow."""
_LAYOUTS = {
    "float32": (np.dtype(np.float32), np.uint32, 23, 0x3F800000),
    "float16": (np.dtype(np.float16), np.uint16, 10, 0x3C00),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.uint16, 7, 0x3F80),
}
"""Types of at most 32 bits, with the integer type of the same size, the number of fraction bits and the bits of 1.0."""


class Generator:
    """The numbers that TensorFlow's stateless functions draw for a seed.

    Args:
        seed: two integers of up to 64 bits.
    """

    def __init__(self, seed: Sequence[int]) -> None:
        low, high = (int(part) % 2**64 for part in seed)
        words = [low % 2**32, low >> 32, high % 2**32, high >> 32]
        mixed = _philox([np.array([word], np.uint64) for word in words], _SCRAMBLING_KEY)
        first, second, third, fourth = (int(word[0]) for word in mixed)
        self._key, self._upper = (first, second), (third, fourth)

    def integers(self, first: int, number: int) -> np.ndarray:
        """Return 32-bit integers, in an array of uint64.

        Args:
            first: index of the first one, a multiple of 4.
            number: how many to return.
        """
        counts = np.arange(first // _LANES, -(-(first + number) // _LANES), dtype=np.uint64)
        return np.stack(self._words(counts), -1).reshape(-1)[:number]

    def uniform(self, shape: Sequence[int], dtype: Any = "float32") -> np.ndarray:
        """Return numbers in [0, 1), equal to `tf.random.stateless_uniform` bit by bit."""
        kind, make, group = _choose(dtype, lambda words: [_unit(word, dtype) for word in words], _wide_units)
        return self._fill(shape, kind, group, lambda counts: make(self._words(counts)))

    def normal(self, shape: Sequence[int], dtype: Any = "float32") -> np.ndarray:
        """Return standard normal numbers, equal to `tf.random.stateless_normal` up to rounding; see `_EXACT`."""
        kind, make, group = _choose_normals(shape, dtype)
        return self._fill(shape, kind, group, lambda counts: make(self._words(counts)))

    def truncated_normal(self, shape: Sequence[int], dtype: Any = "float32") -> np.ndarray:
        """Return normal numbers within two standard deviations, as `tf.random.stateless_truncated_normal`.

        See `_EXACT` on rounding.
        """
        kind, make, group = _choose_normals(shape, dtype)
        apart = np.uint64(group * _RESERVED // _LANES)
        return self._fill(shape, kind, group, lambda groups: list(self._truncated(groups * apart, make, group).T))

    def _truncated(self, counts: np.ndarray, make: Callable[[Words], Words], group: int) -> np.ndarray:
        """Return, for each count, the first `group` numbers within the limit that are drawn from this count on."""
        values = np.stack(make(self._words(counts)), -1)
        # a sixth of the groups needs more than one count
        short = ~(np.abs(values) < _LIMIT).all(-1)
        drawn, counts = values[short], counts[short]
        while len(drawn):
            counts = counts + np.uint64(1)
            drawn = np.concatenate([drawn, np.stack(make(self._words(counts)), -1)], -1)
            within = np.abs(drawn) < _LIMIT
            if (within.sum(-1) >= group).all():
                # the numbers within the limit come first, in their order
                order = np.argsort(~within, axis=-1, kind="stable")[:, :group]
                values[short] = np.take_along_axis(drawn, order, -1)
                break
        return values

    def _words(self, counts: np.ndarray) -> Words:
        upper = [np.full(counts.shape, word, np.uint64) for word in self._upper]
        return _philox([counts & _LOW, counts >> _SHIFT, *upper], self._key)

    def _fill(self, shape: Sequence[int], kind: np.dtype[Any], group: int,
              make: Callable[[np.ndarray], Words]) -> np.ndarray:  # fmt: skip
        """Return an array whose entries come in groups, each made from a count."""
        size = math.prod(shape)
        found = np.empty((-(-size // group), group), kind)

        def fill(start: int) -> None:
            counts = np.arange(start, min(start + _BLOCK, len(found)), dtype=np.uint64)
            for lane, values in enumerate(make(counts)):
                found[start : start + len(counts), lane] = values

        starts = range(0, len(found), _BLOCK)
        if size > _EXACT:
            with ThreadPoolExecutor(num_cores()) as pool:
                list(pool.map(fill, starts))
        else:
            for start in starts:
                fill(start)
        return found.reshape(-1)[:size].reshape(shape)


def shuffled(numbers: np.ndarray, seed: Sequence[int]) -> np.ndarray:
    """Return int64 numbers in the order of `tf.random.experimental.stateless_shuffle`.

    Args:
        numbers: shape [n], with n below 2**32.
        seed: see `Generator`.
    """
    order: Any = np.array(numbers, np.int64)
    # an array's own indexing takes ten times as long
    view, generator, last = memoryview(order), Generator(seed), len(order) - 1
    for start in range(0, last, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, last), dtype=np.uint64)
        drawn = generator.integers(start, len(places)) % (np.uint64(len(order)) - places)
        for place, other in enumerate((drawn + places).tolist(), start):
            view[place], view[other] = view[other], view[place]
    return order


def _philox(counter: Words, key: Sequence[int]) -> Words:
    first, second, third, fourth = counter
    for number in range(_ROUNDS):
        keys = [np.uint64((part + step * number) % 2**32) for part, step in zip(key, _KEY_STEPS, strict=True)]
        one, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, third = (other >> _SHIFT) ^ second ^ keys[0], (one >> _SHIFT) ^ fourth ^ keys[1]
        second, fourth = other & _LOW, one & _LOW
    return [first, second, third, fourth]


def _choose(dtype: Any, narrow: Any, wide: Any) -> tuple[np.dtype[Any], Callable[[Words], Words], int]:
    """Return the type, the function for it, and the number of values that the function makes of four words."""
    kind = np.dtype(dtype)
    return (kind, wide, _LANES // 2) if kind == np.float64 else (kind, narrow, _LANES)


def _choose_normals(shape: Sequence[int], dtype: Any) -> tuple[np.dtype[Any], Callable[[Words], Words], int]:
    exact = math.prod(shape) <= _EXACT
    return _choose(dtype, functools.partial(_normals, exact=exact), functools.partial(_wide_normals, exact=exact))


def _unit(word: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a number in [0, 1): the lower bits are used as the fraction of a number in [1, 2), and 1 is subtracted."""
    kind, integer, bits, one = _LAYOUTS[np.dtype(dtype).name]
    fraction = word.astype(integer) & integer((1 << bits) - 1)
    return (fraction | integer(one)).view(kind) - np.ones((), kind)


def _wide_units(words: Words) -> Words:
    """Return the two float64 numbers in [0, 1) of four words."""
    one, upper = np.uint64(0x3FF0000000000000), np.uint64(0xFFFFF)
    fractions = [(words[at] & upper) << _SHIFT | words[at + 1] for at in (0, 2)]
    return [(fraction | one).view(np.float64) - 1.0 for fraction in fractions]


def _normals(words: Words, *, exact: bool) -> Words:
    """Return the four float32 normal numbers of four words."""
    first, second, third, fourth = (_unit(word, "float32") for word in words)
    return [*_box_muller(first, second, exact), *_box_muller(third, fourth, exact)]


def _wide_normals(words: Words, *, exact: bool) -> Words:
    """Return the two float64 normal numbers of four words."""
    first, second = _wide_units(words)
    return _box_muller(first, second, exact)


def _box_muller(first: np.ndarray, second: np.ndarray, exact: bool) -> Words:
    kind = first.dtype.type
    radius = np.sqrt(kind(-2.0) * _log(np.maximum(first, kind(_SMALLEST)), exact))
    # multiplied in float64, as in TensorFlow; NumPy passes complex exponentials to the C library
    angle = (2 * math.pi * second.astype(np.float64)).astype(kind)
    turned: Any = np.exp(1j * angle.astype(np.complex64 if kind is np.float32 else np.complex128))
    return [turned.imag * radius, turned.real * radius]


_HALF, _ROOT = np.float32(0.5), np.float32(0.7)
_TINY = np.float32(2.0**-24)


def _log(values: np.ndarray, exact: bool) -> np.ndarray:
    """Return the logarithms of numbers in (0, 1), as the C library computes them; see `_EXACT` on rounding."""
    if values.dtype == np.float64:
        return np.fromiter(map(math.log, values.tolist()), np.float64, len(values)) if exact else np.log(values)
    # The real part of glibc's `clogf` is `logf` of the absolute value in two cases: if the absolute value is below a
    # half, or if it is below the square root of a half and the imaginary part is not negligible. `_TINY` is not
    # negligible, but does not change the absolute value.
    complex_values = values.astype(np.complex64)
    complex_values.imag = np.where(values < _HALF, np.float32(0), _TINY)
    logarithms: Any = np.log(complex_values)
    found = logarithms.real
    high = values >= _ROOT
    rest = values[high]
    found[high] = list(map(_c_logarithm(), rest.tolist())) if exact else np.log(rest.astype(np.float64))
    return found


@functools.cache
def _c_logarithm() -> Callable[[float], float]:
    """Return the C library's `logf`, or a function that rounds correctly if there is none."""
    try:
        found = ctypes.CDLL("libm.so.6").logf
    except (OSError, AttributeError):
        return math.log
    found.argtypes, found.restype = [ctypes.c_float], ctypes.c_float
    return found
