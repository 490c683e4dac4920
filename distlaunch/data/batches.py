"""Batches as the data hands them to strategies, which part of them a process reads, and their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

Batch = Any
Index = int | np.integer | tf.Tensor
"""A position or a number, in a graph or outside."""


@dataclass(frozen=True)
class Source:
    """Batches before they are loaded, so that each replica loads only its own rows.

    Attributes:
        elements: an endless `tf.data.Dataset` of *row sources*: whatever `load` turns into a batch; each leaf has one
            entry for each row of the global batch in its first dimension. An element with no rows marks the end of an
            epoch whose length was not known.
        load: turns a slice of an element into the batch `(x, y)` or `(x, y, sample_weight)`, in the input pipeline.
            With the keyword `at_once`, so many batches are being loaded at the same time, and share its threads.
        name: which split and order this is; a process that reads batches by number knows it by that name.
        first: number of the first element, counted from the split's very beginning.
        num_batches: elements until the end of one pass; None if not known.
        ends: it has elements without rows, and only reading shows where: processes must agree on each.
        at_once: how many batches are loaded at the same time; None: as many as there are cores.
        threads: examples that they load at the same time, in Python or TensorFlow; 0: whole batches are loaded.
        describe: what processes compare to know that they see the same data; see `data/fingerprints.py`.
        is_process_local: whether an element is `(row source, rows)` with this process's part of the global batch
            only. With 0 rows, the first row is a stand-in, which must not count; 0 rows in all processes mark an end.
        global_batch: its rows, but for the last one of a pass; None if not known.
        check: fails in the graph where a batch does not fit the model, or gives it back; `load` does it already, but
            not that of another process, which has no model. None: nothing is looked at.
    """

    elements: Any
    load: Callable[..., Batch]
    name: str = ""
    first: int = 0
    num_batches: int | None = None
    ends: bool = False
    at_once: int | None = None
    threads: int = 0
    describe: Callable[[], str] = lambda: "{}"
    is_process_local: bool = False
    global_batch: int | None = None
    check: Callable[[Batch], Batch] | None = None


@dataclass(frozen=True)
class Share:
    """A part `index` of `number` equal parts of each global batch."""

    index: int = 0
    number: int = 1


def pack(components: tuple[Any, ...]) -> Any:
    """Return the arguments as one tuple: tf.data passes the components of a tuple as separate arguments."""
    return components[0] if len(components) == 1 else components


def num_rows(element: Any) -> tf.Tensor:
    """Return the number of rows of an element, a scalar int64."""
    # composites stay whole: the values of a ragged tensor are not its rows
    first = tf.nest.flatten(element, expand_composites=False)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int64)
    return tf.shape(first, out_type=tf.int64)[0]


def any_rows(leaf: Any) -> Any:
    """Return the specification of a leaf of a batch with any number of rows."""
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    return (tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec)(shape, leaf.dtype)


def slice_rows(element: Any, start: Index, stop: Index) -> Any:
    """Return rows `start` to `stop` of every leaf."""

    def rows(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            # a SparseTensor cannot be indexed with a slice
            size = tf.concat([[stop - start], leaf.dense_shape[1:]], 0)
            begin = tf.concat([[start], tf.zeros_like(leaf.dense_shape[1:])], 0)
            return tf.sparse.slice(leaf, begin, size)
        return leaf[start:stop]

    return tf.nest.map_structure(rows, element)
