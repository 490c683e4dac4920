"""Replaces the operations behind all of TensorFlow's stateless random numbers, those of Keras's layers among them."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from distlaunch.patches.symbols import Patch, Symbol, internal

Draw = Callable[..., Any]
"""(shape, key, counter, ...) -> numbers."""

COUNTING = ("stateless_random_uniform_v2", "stateless_random_normal_v2")
"""Of these, one count of the generator makes a fixed number of values."""
OTHERS = ("stateless_truncated_normal_v2", "stateless_random_uniform_int_v2", "stateless_random_uniform_full_int_v2")

_HOME = "tensorflow.python.ops.stateless_random_ops.gen_stateless_random_ops_v2"
_KNOWN_SHAPE = Symbol("tensorflow.python.framework.tensor_util.constant_value_as_shape", "(tensor)")

PATCH = Patch(
    symbols=(
        Symbol(f"{_HOME}.stateless_random_uniform_v2", "(shape, key, counter, alg, dtype=tf.float32, name=None)"),
        Symbol(f"{_HOME}.stateless_random_normal_v2", "(shape, key, counter, alg, dtype=tf.float32, name=None)"),
        Symbol(f"{_HOME}.stateless_truncated_normal_v2", "(shape, key, counter, alg, dtype=tf.float32, name=None)"),
        Symbol(f"{_HOME}.stateless_random_uniform_int_v2", "(shape, key, counter, alg, minval, maxval, name=None)"),
        Symbol(
            f"{_HOME}.stateless_random_uniform_full_int_v2", "(shape, key, counter, alg, dtype=tf.uint64, name=None)"
        ),
        _KNOWN_SHAPE,
    ),
    why="Replicas whose seeds are the same would all draw the numbers of the first rows, and DTensor draws other "
    "numbers in other layouts; each row has to get the numbers that one device draws for it.",
    until="TensorFlow's generators take the place of a part in a whole tensor, as JAX's partitionable threefry does.",
)


@functools.cache
def replace_draws(replacement: Callable[[str, Draw], Draw]) -> None:
    """Replaces the operations for good; does nothing the second time.

    Args:
        replacement: (name, operation) -> what stands in its place.
    """
    PATCH.check()
    module = internal(_HOME)
    for name in (*COUNTING, *OTHERS):
        setattr(module, name, replacement(name, getattr(module, name)))


@contextlib.contextmanager
def draws_through(change: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Within it, what the operations draw is what `change` makes of it."""
    PATCH.check()
    module = internal(_HOME)
    # what stands there now, which may be a replacement of `replace_draws`: that one must stay in force within
    kept = {name: getattr(module, name) for name in (*COUNTING, *OTHERS)}

    def changed(draw: Draw) -> Draw:
        return lambda *args, **kwargs: change(draw(*args, **kwargs))

    for name, draw in kept.items():
        setattr(module, name, changed(draw))
    try:
        yield
    finally:
        for name, draw in kept.items():
            setattr(module, name, draw)


def known_shape(shape: Any) -> Any:
    """The TensorShape that is known of a shape, given as a tensor, while a function is traced."""
    return _KNOWN_SHAPE.get()(tf.convert_to_tensor(shape))
