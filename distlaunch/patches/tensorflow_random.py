"""Replaces the operations behind all stateless random numbers of TensorFlow, including those of Keras's layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal, replaced_attributes
from distlaunch.patches.tensorflow_late import tf

Draw = Callable[..., Any]
"""Maps (shape, key, counter, ...) to numbers."""

COUNTING = ("stateless_random_uniform_v2", "stateless_random_normal_v2")
"""Operations that make a fixed number of values from each value of the generator's counter."""
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
    why="Replicas with the same seeds would all draw the numbers of the first rows, and DTensor draws different "
    "numbers in different layouts; each row has to get the numbers that one device draws for it.",
    until="TensorFlow's generators accept the position of a part in a whole tensor, like JAX's partitionable threefry.",
)


@functools.cache
def replace_draws(replacement: Callable[[str, Draw], Draw]) -> None:
    """Replace the operations permanently; a second call does nothing.

    Args:
        replacement: maps (name, operation) to the replacement.
    """
    PATCH.check()
    module = internal(_HOME)
    for name in (*COUNTING, *OTHERS):
        setattr(module, name, replacement(name, getattr(module, name)))


@contextlib.contextmanager
def change_draws(change: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Apply `change` to the results of random operations in this context."""
    PATCH.check()
    module = internal(_HOME)

    def changed(draw: Draw) -> Draw:
        return lambda *args, **kwargs: change(draw(*args, **kwargs))

    # the current functions may be replacements by `replace_draws`, which must stay in force
    with replaced_attributes((module, name, changed(getattr(module, name))) for name in (*COUNTING, *OTHERS)):
        yield


def known_shape(shape: Any) -> Any:
    """Return the static TensorShape of a shape that is given as a tensor, while a function is traced."""
    return _KNOWN_SHAPE.get()(tf.convert_to_tensor(shape))
