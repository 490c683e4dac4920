"""Number of batches that are loaded ahead of the steps, limited in number and bytes."""

from __future__ import annotations

from typing import Any

from distlaunch.patches.tensorflow_late import tf

MOST_BATCHES, MOST_BYTES = 2, 256_000_000


def batches_ahead(spec: Any, rows: int | None) -> int:
    """Return the number of batches to load ahead, at least one, so that reading and training overlap.

    Args:
        spec: type specs of a batch; the first dimension is ignored.
        rows: rows of a batch; None if unknown, and then the number of bytes is not limited.
    """
    return limit_by_bytes(MOST_BATCHES, spec, rows)


def limit_by_bytes(most: int, spec: Any, rows: int | None) -> int:
    """Return how many of `most` batches fit into `MOST_BYTES`, at least one; see `batches_ahead`."""
    num_bytes = None if rows is None else _row_bytes(spec)
    return most if not num_bytes else max(1, min(most, MOST_BYTES // (num_bytes * max(rows or 1, 1))))


def _row_bytes(spec: Any) -> int | None:
    """Return the bytes of one row, or None if the type does not determine them."""
    total = 0
    for leaf in tf.nest.flatten(spec, expand_composites=False):
        is_dense = isinstance(leaf, tf.TensorSpec) and leaf.dtype not in (tf.string, tf.variant)
        if not is_dense or not leaf.shape[1:].is_fully_defined():
            return None
        total += leaf.shape[1:].num_elements() * leaf.dtype.size
    return total
