"""Replaces Keras's random numbers on JAX, those of layers and initializers, temporarily."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.core

from distlaunch.patches.symbols import Patch, Symbol, internal, replaced_attributes

Draw = Callable[..., Any]

_HOME = "keras.src.backend.jax.random"
_DRAW_SEED = Symbol(f"{_HOME}.jax_draw_seed", "(seed)")

PATCH = Patch(
    symbols=(
        Symbol(f"{_HOME}.normal", "(shape, mean=0.0, stddev=1.0, dtype=None, seed=None)"),
        Symbol(f"{_HOME}.truncated_normal", "(shape, mean=0.0, stddev=1.0, dtype=None, seed=None)"),
        Symbol(f"{_HOME}.uniform", "(shape, minval=0.0, maxval=1.0, dtype=None, seed=None)"),
        Symbol(f"{_HOME}.dropout", "(inputs, rate, noise_shape=None, seed=None)"),
        _DRAW_SEED,
    ),
    why="The random generators of TensorFlow and JAX differ, so a model would have different initial weights and "
    "masks, and no run on JAX could be compared with one on TensorFlow.",
    until="Keras's random numbers are the same on every backend, or come from a generator that can be chosen.",
)


@contextlib.contextmanager
def draw_with(on_host: Mapping[str, Draw], in_step: Mapping[str, Draw]) -> Iterator[None]:
    """Draw random numbers with other functions in this context; their first argument is the seed's state.

    Args:
        on_host: functions for draws outside traced functions, by the names of Keras's functions.
        in_step: functions for draws within traced functions, by the same names; if the result is None, Keras draws.
    """
    PATCH.check()
    keras_random = internal(_HOME)
    with replaced_attributes(
        (keras_random, name, _instead_of(getattr(keras_random, name), on_host.get(name), in_step.get(name)))
        for name in {**on_host, **in_step}
    ):
        yield


def _instead_of(original: Draw, on_host: Draw | None, in_step: Draw | None) -> Draw:
    def drawn(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
        # only once: each call advances a SeedGenerator, and Keras's function must get the same seed
        given = _DRAW_SEED.get()(seed)
        # a traced seed has no value yet, so the host cannot draw with it
        draw = in_step if isinstance(given, jax.core.Tracer) else on_host
        values = None if draw is None else draw(given, *args, **kwargs)
        return original(*args, seed=given, **kwargs) if values is None else values

    return drawn
