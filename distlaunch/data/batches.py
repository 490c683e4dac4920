"""Interface between data and strategies: sources of batches, shares of processes, and functions on rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlaunch.data.structures import flatten, map_structure
from distlaunch.patches.tensorflow_late import is_a, tf

Batch = Any
Index = Any
"""A position or a count: an integer, or a scalar tensor in a graph."""


@dataclass(frozen=True)
class Source:
    """Global batches before they are loaded, so that each replica loads only its own rows.

    Attributes:
        elements: endless `tf.data.Dataset`, or iterable, of *row sources*. A row source is a structure of tensors from
            which `load` makes a batch. The first dimension of each leaf counts the rows of the global batch. An element
            without rows marks the end of a pass of unknown length.
        load: returns the batch `(x, y)` or `(x, y, sample_weight)` of a slice of an element, in the input pipeline. The
            argument `at_once` is the number of calls that run at the same time and share the threads.
        name: identifies the split and its order, for processes that read batches by number.
        first: index of the first element, counted from the beginning of the first pass.
        num_batches: number of elements in a pass; None if unknown.
        ends: whether the end of a pass is found only by reading. Elements without rows mark such ends, and the
            processes must agree on each of them.
        at_once: number of batches that are loaded at the same time; None for the number of cores.
        threads: number of examples that are loaded at the same time; 0 if batches are loaded as a whole.
        describe: returns the description by which processes check that they read the same data; see
            `data/fingerprints.py`.
        is_process_local: whether an element is `(row source, rows)` with this process's part of the global batch
            only. If `rows` is 0, the row source has one stand-in row, which must not count. 0 rows in all processes
            mark an end.
        global_batch: rows of a global batch, except the last one of a pass; None if unknown.
        check: returns its argument, a batch, or fails in the graph if the batch does not fit the model. `load` includes
            this check, except in a process that only reads batches for others, which has no model. None for no check.
        record: called in the input pipeline with each loaded part of a batch; see `RowRecorder.record`. None to record
            nothing.
        on_host: whether NumPy arrays take the place of tensors: `elements` is an iterable, and `load` returns arrays.
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
    record: Callable[..., None] | None = None
    on_host: bool = False


@dataclass(frozen=True)
class Share:
    """Part number `index` of each global batch. The batch is divided into `number` parts, as equal as possible."""

    index: int = 0
    number: int = 1


def pack(components: tuple[Any, ...]) -> Any:
    """Return the element with which tf.data has called a function. tf.data passes a tuple as several arguments."""
    return components[0] if len(components) == 1 else components


def num_rows(element: Any) -> Any:
    """Return the number of rows of an element as an int64: a NumPy scalar if the element has arrays, else a tensor."""
    # composite tensors are not expanded, because the values of a ragged tensor are not its rows
    first = flatten(element)[0]
    if isinstance(first, np.ndarray):
        return np.int64(len(first))
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
        if is_a(leaf, "SparseTensor"):
            # a SparseTensor cannot be indexed with a slice
            size = tf.concat([[stop - start], leaf.dense_shape[1:]], 0)
            begin = tf.concat([[start], tf.zeros_like(leaf.dense_shape[1:])], 0)
            return tf.sparse.slice(leaf, begin, size)
        return leaf[start:stop]

    return map_structure(rows, element)
