"""Records the rows of a few batches as the strategy loads them, so that the same steps can be computed elsewhere.

The rows are recorded where `data/rows.py` has loaded them for the replicas or the mesh. So data that is read in another
order each time, or augmented at random, is recorded as it was trained.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlaunch.data.batches import Batch
from distlaunch.data.structures import ArraySpec, flatten, map_structure, pack
from distlaunch.patches.tensorflow_late import tf


@dataclass(frozen=True)
class Rows:
    """Some rows of one batch.

    Attributes:
        index: index of the batch in its source.
        start: index of the first row in the global batch, or in the process's part of it if the data is process-local.
        rows: number of rows.
        total: number of rows of the global batch, or of the process's part.
        leaves: the serialized tensors of the batch, in the order of `tf.nest.flatten` with expanded composites.
    """

    index: int
    start: int
    rows: int
    total: int
    leaves: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """Return these rows in the format of a `.npz` file."""
        file = io.BytesIO()
        place = np.array([self.index, self.start, self.rows, self.total], np.int64)
        np.savez(file, place, *(np.frombuffer(leaf, np.uint8) for leaf in self.leaves))
        return file.getvalue()

    @staticmethod
    def from_bytes(content: bytes) -> Rows:
        """Return the rows of `to_bytes`. Raise ValueError or KeyError if the content has another format."""
        # no pickles, because another host may have sent the rows
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            index, start, rows, total = map(int, file["arr_0"])
            leaves = tuple(file[f"arr_{at}"].tobytes() for at in range(1, len(file.files)))
            return Rows(index, start, rows, total, leaves)


class RowRecorder:
    """Records the rows of some batches of a source.

    Args:
        indices: indices of the batches to record, counted from the first element of the source.
        keep: called with the rows, in a thread of the input pipeline. It may get the same rows several times, because a
            source can be read again; the last call counts.

    Attributes:
        spec: the types of a batch, as a structure of `tf.TypeSpec`, or of `ArraySpec` for a source that is read on the
            host; None until the source is connected.
    """

    def __init__(self, indices: Collection[int], keep: Callable[[Rows], None]) -> None:
        self._indices, self._keep = sorted(indices), keep
        self.spec: Any = None

    def record(self, index: tf.Tensor, batch: Batch, start: tf.Tensor, rows: tf.Tensor, total: tf.Tensor) -> None:
        """Record a part of a batch if the batch's index is in `indices`; called in the input pipeline.

        Args:
            index: index of the batch; this and the other numbers are int64 scalars.
            batch: the rows of the part.
            start: index of its first row in the batch.
            rows: number of its rows; 0 for a stand-in.
            total: number of rows of the batch; 0 at the end of an epoch.
        """
        if isinstance(flatten(batch)[0], np.ndarray):
            self._record_arrays(index, batch, start, rows, total)
            return
        self.spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
        leaves = tf.nest.flatten(batch, expand_composites=True)

        def call() -> Any:
            serialized = [tf.io.serialize_tensor(leaf) for leaf in leaves]
            return tf.numpy_function(self._write, [index, start, rows, total, *serialized], tf.int64)

        # this runs in the function that loads the batch, because a separate function would cost more than the condition
        tf.cond(tf.reduce_any(tf.constant(self._indices, tf.int64) == index), call, lambda: tf.constant(0, tf.int64))

    def _record_arrays(self, index: Any, batch: Batch, start: Any, rows: Any, total: Any) -> None:
        self.spec = map_structure(ArraySpec.of, batch)
        # text cannot be recorded; JAX refuses it anyway
        if int(index) in self._indices and not any(leaf.dtype.hasobject for leaf in flatten(batch)):
            # as bytes, because `.npy` files have no type for bfloat16
            leaves = [_npy(np.ascontiguousarray(leaf).view(np.uint8)) for leaf in flatten(batch)]
            self._write(index, start, rows, total, *leaves)

    def _write(self, index: Any, start: Any, rows: Any, total: Any, *leaves: Any) -> np.int64:
        if rows > 0 and total > 0:
            self._keep(Rows(int(index), int(start), int(rows), int(total), tuple(map(bytes, leaves))))
        return np.int64(0)


def read_batch(spec: Any, parts: Sequence[Rows]) -> Batch:
    """Return a batch that consists of recorded rows, in the order of `parts`.

    Args:
        spec: the attribute `spec` of the recorder.
    """
    if isinstance(flatten(spec)[0], ArraySpec):
        return _read_arrays(spec, parts)
    flat = tf.nest.flatten(spec, expand_composites=True)

    def part(rows: Rows) -> Batch:
        leaves = [tf.io.parse_tensor(leaf, each.dtype) for leaf, each in zip(rows.leaves, flat, strict=True)]
        return tf.nest.pack_sequence_as(spec, leaves, expand_composites=True)

    return tf.nest.map_structure(_joined, *map(part, parts)) if len(parts) > 1 else part(parts[0])


def _read_arrays(spec: Any, parts: Sequence[Rows]) -> Batch:
    kinds = [np.dtype(each.dtype) for each in flatten(spec)]
    leaves = [
        np.concatenate([np.load(io.BytesIO(part.leaves[at]), allow_pickle=False).view(kind) for part in parts])
        for at, kind in enumerate(kinds)
    ]
    return pack(spec, leaves)


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _joined(*leaves: Any) -> Any:
    return tf.sparse.concat(0, list(leaves)) if isinstance(leaves[0], tf.SparseTensor) else tf.concat(leaves, 0)
