"""Lets Keras's random numbers on JAX, those of its layers and initializers, be drawn otherwise for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from distlaunch.patches.symbols import Patch, Symbol, internal

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
    why="The random generators of TensorFlow and JAX differ, so a model would have other initial weights and masks, "
    "and no run on JAX could be compared with one on TensorFlow.",
    until="Keras's random numbers are the same on every backend, or come from a generator that can be chosen.",
)


@contextlib.contextmanager
def drawn_by(on_host: Mapping[str, Draw], in_step: Mapping[str, Draw]) -> Iterator[None]:
    """Within it, other functions draw, by the names of Keras's; they get the seed's state as their first argument.

    Args:
        on_host: for values that are wanted now.
        in_step: for values in a traced function; None as their result: Keras draws.
    """
    PATCH.check()
    keras_random = internal(_HOME)
    originals = {name: getattr(keras_random, name) for name in {**on_host, **in_step}}
    for name, original in originals.items():
        setattr(keras_random, name, _instead_of(original, on_host.get(name), in_step.get(name)))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(keras_random, name, original)


def _instead_of(original: Draw, on_host: Draw | None, in_step: Draw | None) -> Draw:
    def drawn(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
        # once: each call moves a SeedGenerator on, and Keras's function must get the same seed then
        given = _DRAW_SEED.get()(seed)
        # a traced seed has no value yet, so the host cannot draw with it
        draw = in_step if isinstance(given, jax.core.Tracer) else on_host
        values = None if draw is None else draw(given, *args, **kwargs)
        return original(*args, seed=given, **kwargs) if values is None else values

    return drawn
