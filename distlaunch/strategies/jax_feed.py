"""Batches on the devices of a JAX mesh, the next one loaded while the devices compute."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.errors import ConfigError, Problem
from distlaunch.strategies.mesh_layout import Axes, dividing_axes, map_batch
from distlaunch.strategies.protocol import Batch, Source
from distlaunch.strategies.replica_input import split_rows


class Placement:
    """Where a batch lies: inputs are split by `axes`, labels and weights by the first of them."""

    def __init__(self, mesh: Mesh, axes: Axes) -> None:
        self._mesh, self.axes = mesh, axes

    def put(self, batch: Batch) -> Batch:
        """Host arrays on the devices; a dimension of the batch that its axis does not divide stays whole."""
        return self._map(lambda leaf, axes: jax.device_put(leaf, self._sharding(leaf, axes, whole_rows=True)), batch)

    def constrain(self, batch: Batch) -> Batch:
        """In a traced function: rows are split also where they do not divide, which XLA does exactly."""

        def split(leaf: Any, axes: Axes) -> Any:
            return jax.lax.with_sharding_constraint(leaf, self._sharding(leaf, axes, whole_rows=False))

        return self._map(split, batch)

    def _map(self, action: Any, batch: Batch) -> Batch:
        return map_batch(action, batch, self.axes)

    def _sharding(self, leaf: Any, axes: Axes, *, whole_rows: bool) -> NamedSharding:
        chosen = dividing_axes(leaf.shape, axes, self._mesh.shape, whole_rows=whole_rows)
        return NamedSharding(self._mesh, PartitionSpec(*chosen))


class Feed:
    """Takes a source's batches in turn."""

    def __init__(self, source: Source, placement: Placement) -> None:
        self._parts = iter(split_rows(source, first_replica=0, num_local=1, num_replicas=1))
        self._placement = placement
        self._ahead: list[Batch | None] = []

    def take(self) -> Batch | None:
        """The next batch; None at the end of a pass whose length was not known."""
        self.load_ahead()
        return self._ahead.pop()

    def load_ahead(self) -> None:
        """Starts to copy the next batch, if that is not done yet."""
        if not self._ahead:
            batch, rows, _ = next(self._parts)
            self._ahead.append(self._placement.put(on_host(batch)) if rows > 0 else None)


def on_host(batch: Batch) -> Batch:
    """The batch as arrays that JAX can hold.

    Raises:
        ConfigError: it holds text, or rows of different lengths.
    """
    return tf.nest.map_structure(_array, batch)


def _array(leaf: Any) -> np.ndarray:
    """As JAX holds it, without 64 bits."""
    if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.string, tf.variant):
        kind = leaf.dtype.name if isinstance(leaf, tf.Tensor) else type(leaf).__name__
        message = f"a batch holds {kind}, which JAX has not; turn it into numbers of one shape in the data function"
        raise ConfigError(Problem(("data",), message))
    array = leaf.numpy()
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
