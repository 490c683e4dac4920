"""The number of batches that are made ahead of the steps, bounded in number and bytes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

MOST_BATCHES, MOST_BYTES = 2, 256_000_000


def batches_ahead(spec: Any, rows: int | None) -> int:
    """Return the number of batches to make ahead, at least one, so that reading and training overlap.

    Args:
        spec: of a batch; its first dimension is not looked at.
        rows: of the batch; None: not known, and so the bytes are not either.
    """
    return at_once(MOST_BATCHES, spec, rows)


def at_once(most: int, spec: Any, rows: int | None) -> int:
    """Return how many of `most` batches fit into `MOST_BYTES`, at least one; see `batches_ahead`."""
    num_bytes = None if rows is None else _row_bytes(spec)
    return most if not num_bytes else max(1, min(most, MOST_BYTES // (num_bytes * max(rows or 1, 1))))


def _row_bytes(spec: Any) -> int | None:
    """Return the bytes of one row, or None if its type does not say."""
    total = 0
    for leaf in tf.nest.flatten(spec, expand_composites=False):
        is_dense = isinstance(leaf, tf.TensorSpec) and leaf.dtype not in (tf.string, tf.variant)
        if not is_dense or not leaf.shape[1:].is_fully_defined():
            return None
        total += leaf.shape[1:].num_elements() * leaf.dtype.size
    return total
