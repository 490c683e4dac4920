"""Private parts of JAX that distlaunch uses, each behind a named function."""

from __future__ import annotations

from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, private

_STATE = Symbol("jax._src.distributed.global_state")

PATCH = Patch(
    symbols=(_STATE,),
    why="The processes of a mesh communicate through JAX's own coordination service.",
    until="JAX makes the key-value store of its coordination service public.",
)


def coordination_client() -> Any:
    """Return the key-value client for all processes: `key_value_set_bytes`, `blocking_key_value_get_bytes` etc."""
    return private(_STATE.get(), "client")
