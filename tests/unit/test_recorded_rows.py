"""Rows are recorded as replicas and processes of a mesh load them, and are joined to the batch that one device has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from distlaunch.data.batches import Source, num_rows, slice_rows
from distlaunch.data.recorded_rows import RowRecorder, Rows, read_batch
from distlaunch.data.rows import rows_of_process, split_rows

pytestmark = pytest.mark.usefixtures("virtual_devices")

SIZES = [5, 5, 3]


def batch(number: int, rows: int) -> Any:
    """Dense, ragged and sparse rows of numbers and texts."""
    first = 10 * number
    values = tf.range(first, first + rows)
    x = {
        "dense": tf.cast(values, tf.float32)[:, None] * tf.constant([[1.0, 2.0]]),
        "text": tf.strings.as_string(values) + "\0",
        "ragged": tf.RaggedTensor.from_row_lengths(tf.range(rows * (rows - 1) // 2), tf.range(rows)),  # pyright: ignore[reportAttributeAccessIssue]
        "sparse": tf.sparse.from_dense(tf.cast(values, tf.int64)[:, None] * tf.constant([[0, 1]], tf.int64)),
    }
    return x, values


def source(recorder: RowRecorder) -> Source:
    whole = [batch(number, rows) for number, rows in enumerate(SIZES)]

    def load(element: Any, *, at_once: int = 1) -> Any:
        del at_once
        number, at = element["batch"][0], element["row"]
        cases = [lambda each=each: slice_rows(each, at[0], at[-1] + 1) for each in whole]
        return tf.switch_case(tf.cast(number, tf.int32), cases)

    def elements() -> Any:
        for number, rows in enumerate(SIZES):
            yield {"batch": np.full(rows, number, np.int64), "row": np.arange(rows)}

    spec = {name: tf.TensorSpec([None], tf.int64) for name in ("batch", "row")}
    return Source(tf.data.Dataset.from_generator(elements, output_signature=spec), load, record=recorder.record)


def leaves(value: Any) -> list[Any]:
    return [leaf.numpy().tolist() for leaf in tf.nest.flatten(value, expand_composites=True)]


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas(replicas: int) -> None:
    kept: list[Rows] = []
    recorder = RowRecorder({0, 2}, kept.append)
    for _ in split_rows(source(recorder), first_replica=0, num_local=replicas, num_replicas=replicas).take(
        3 * replicas
    ):
        pass
    assert sorted({rows.index for rows in kept}) == [0, 2]
    kept = [Rows.from_bytes(rows.to_bytes()) for rows in kept]
    for index in (0, 2):
        parts = sorted((rows for rows in kept if rows.index == index), key=lambda rows: rows.start)
        assert [rows.total for rows in parts] == [SIZES[index]] * len(parts)
        joined = read_batch(recorder.spec, parts)
        assert int(num_rows(joined)) == SIZES[index]
        assert leaves(joined) == leaves(batch(index, SIZES[index]))


def test_a_mesh_reads_the_whole_of_a_batch_that_its_parts_do_not_divide() -> None:
    kept: list[Rows] = []
    recorder = RowRecorder({1}, kept.append)
    list(rows_of_process(source(recorder), first=0, number=1, of=2).take(3))
    (rows,) = kept
    assert (rows.index, rows.start, rows.rows, rows.total) == (1, 0, 5, 5)
    assert leaves(read_batch(recorder.spec, kept)) == leaves(batch(1, 5))
