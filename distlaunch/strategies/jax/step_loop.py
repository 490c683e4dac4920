"""Several training steps in one call: a loop on the devices over batches that are stacked.

A call of a compiled function takes Python about half a millisecond, in which a small model could make several steps.
Each number of steps runs the same compiled loop, so that the results do not depend on how steps are grouped into calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distlaunch.data.batches import Batch
from distlaunch.strategies.jax.operation_checks import CONVOLUTION, equations
from distlaunch.strategies.mesh.functional_step import TrainState

Step = Callable[[TrainState, dict[str, Any], Batch], tuple[TrainState, dict[str, Any], jax.Array]]
"""A training step with the sums of its logs; the last result is finite if the losses are."""

MOST_SLOTS = 16
_MOST_BYTES = 8_000_000
"""Size of stacked batches. With larger batches, a step takes so long that a call of its own costs little."""
_LARGE_STATE = 1_000_000_000
"""Bytes of a state whose steps take long too. A loop might need memory for a second copy."""


def choose_slots(step: Any, state: TrainState, sums: dict[str, Any], batch: Batch, platform: str) -> int:
    """Return how many batches to stack; 1 if each step should be a call of its own.

    The number depends only on the model, the batch and the kind of device, so that a resumed run makes the same calls.

    Args:
        step: the traced step (`jax.stages.Traced`).
        state, sums, batch: what it was traced with.
    """
    jaxpr = step.jaxpr
    if jaxpr.effects or _bytes(state) > _LARGE_STATE or not _has_types_of(step.out_info[:2], (state, sums)):
        return 1
    # within a loop, XLA computes convolutions on CPUs with other code, which takes 3 to 4 times as long (JAX 0.10)
    if platform == "cpu" and any(equation.primitive.name == CONVOLUTION for equation, _ in equations(jaxpr.jaxpr)):
        return 1
    return max(1, min(MOST_SLOTS, _MOST_BYTES // max(_bytes(batch), 1)))


def looped(step: Step, place: Callable[[Batch], Batch], *, stops: bool) -> Callable[..., Any]:
    """Return a function that makes the steps of some of the stacked batches.

    It takes the state, the sums, whether to make any step, the batches (shape [slots, rows, ...]), the index of the
    first batch, and the index after the last. It returns the state, the sums, the third result of each step in an array
    of shape [slots], and whether to make further steps.

    Args:
        place: gives a batch within the loop its sharding.
        stops: whether no step follows one whose losses are not finite.
    """

    def call(state: TrainState, sums: dict[str, Any], goes_on: Any, batches: Batch, first: Any, stop: Any) -> Any:
        def is_left(carry: Any) -> Any:
            index, goes_on = carry[0], carry[1]
            return (index < stop) & goes_on

        def make_step(carry: Any) -> Any:
            index, goes_on, state, sums, probes = carry
            batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), batches)
            state, sums, probe = step(state, sums, place(batch))
            goes_on = jnp.isfinite(probe) if stops else goes_on
            return index + 1, goes_on, state, sums, probes.at[index].set(probe)

        slots = jax.tree.leaves(batches)[0].shape[0]
        begin = jnp.asarray(first, jnp.int32), goes_on, state, sums, jnp.zeros(slots, jnp.float32)
        _, goes_on, state, sums, probes = jax.lax.while_loop(is_left, make_step, begin)
        return state, sums, probes, goes_on

    return call


def stacked_spec(leaf: jax.ShapeDtypeStruct, slots: int) -> jax.ShapeDtypeStruct:
    """Return the type and the sharding of stacked batches, for those of a batch."""
    sharding: Any = leaf.sharding
    spec = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((slots, *leaf.shape), leaf.dtype, sharding=spec)


def _bytes(values: Any) -> int:
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(values))


def _has_types_of(values: Any, others: Any) -> bool:
    """Return whether a step returns a state like the one it takes, as a loop needs; a step of the user may not."""
    types = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(each)] for each in (values, others)]
    return jax.tree.structure(values) == jax.tree.structure(others) and types[0] == types[1]
