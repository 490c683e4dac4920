"""Keeps Keras on JAX from using flash attention while it computes on the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal, replaced_attributes

_HOME = "keras.src.backend.jax.nn"
_ATTENTION = Symbol(f"{_HOME}.dot_product_attention", "(query, key, value, ..., flash_attention=None, ...)")

PATCH = Patch(
    symbols=(_ATTENTION,),
    why="Keras asks the first GPU whether it supports flash attention, also where a computation runs on the host. "
    "Building a model with attention in 16 bits then fails while it is compiled. Computed without compiling, it prints "
    "a traceback for each layer.",
    until="Keras asks the device that computes.",
)


@contextlib.contextmanager
def without_flash_attention() -> Iterator[None]:
    """Compute attention with XLA in this context, whatever the layers ask for."""
    attention = _ATTENTION.get()

    @functools.wraps(attention)
    def computed_by_xla(*args: Any, flash_attention: bool | None = None, **kwargs: Any) -> Any:
        del flash_attention
        return attention(*args, flash_attention=False, **kwargs)

    with replaced_attributes([(internal(_HOME), "dot_product_attention", computed_by_xla)]):
        yield
