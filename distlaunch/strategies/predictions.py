"""Predicts for a whole split, batch by batch, and combines the predictions of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import slice_rows
from distlaunch.patches.tensorflow_late import tf
from distlaunch.strategies.replica.row_random import RowPlace, draw_for_rows

_SUMMABLE = ("float32", "float64", "int32", "int64")  # dtypes that processes can sum


def make_predict_call(strategy: Any, model: keras.Model, num_processes: int) -> Callable[..., Any]:
    """Return a function that predicts for one element of the input (see `split_rows`).

    The function returns the predictions of the global batch on the host. Each of several processes fills the rows of
    the other processes with zeros, so the sum over all processes contains all predictions.

    A model may return several rows for each example, such as a row for each token. The rows are in the order of the
    examples. With several replicas, the function raises ConfigError if that order is unknown, because the number of
    rows is not a multiple of the number of examples.
    """

    def local(batch: Any, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> Any:
        # layers may draw random numbers in predictions too
        place = RowPlace(start, tf.maximum(tf.cast(rows, tf.int64), 1), tf.cast(total, tf.int64))
        with draw_for_rows(place):
            # the slice makes the number of rows unknown in the trace, so that `draw_for_rows` recognizes draws for rows
            outputs = model.predict_step(slice_rows(batch, tf.zeros_like(place.rows), place.rows))
        lengths = tf.nest.map_structure(lambda leaf: tf.shape(leaf)[0], outputs)
        if num_processes > 1:
            outputs = tf.nest.map_structure(lambda leaf: _sum_over_processes(leaf, rows, total, start), outputs)
        return outputs, lengths

    # relaxed shapes, so that one more trace serves smaller batches of any size
    @tf.function(autograph=False, reduce_retracing=True)
    def call(element: Any) -> Any:
        return strategy.run(local, args=element)

    def predict(element: Any) -> Any:
        counts = [int(rows) for rows in strategy.experimental_local_results(element[1])]

        def on_host(leaf: Any, lengths: Any) -> np.ndarray:
            # in the order of replicas, which is the order of rows
            values = [np.asarray(value) for value in strategy.experimental_local_results(leaf)]
            if strategy.num_replicas_in_sync > 1:
                _check_lengths([int(length) for length in strategy.experimental_local_results(lengths)], counts)
            if num_processes > 1:
                # each replica has the sum, which is the whole batch
                return values[0]
            # without the stand-in row of a replica without rows
            return np.concatenate([value for value, count in zip(values, counts, strict=True) if count])

        outputs, lengths = call(element)
        return tf.nest.map_structure(on_host, outputs, lengths)

    return predict


def _check_lengths(lengths: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ConfigError unless all replicas predict the same whole number of rows for each example.

    Args:
        lengths: the number of rows that each replica has predicted.
        counts: the number of its examples; 0 for a stand-in row.
    """
    times = {length / max(count, 1) for length, count in zip(lengths, counts, strict=True)}
    if len(times) == 1 and times.pop().is_integer():
        return
    of_replicas = " and ".join(f"{length} for {max(n, 1)}" for length, n in zip(lengths, counts, strict=True))
    message = f"the model predicts a number of rows that does not follow from the number of examples ({of_replicas})"
    hint = "predict with --set strategy.kind=one_device, or return the same number of rows for each example"
    raise ConfigError(Problem(("model", "function"), f"{message}, so replicas cannot share a batch; {hint}"))


def _sum_over_processes(leaf: tf.Tensor, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Return the predictions of all replicas, given those of one."""
    dtype = leaf.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        message = f"the model predicts {dtype.name}, which processes cannot exchange"
        raise ConfigError(Problem(("model", "function"), f"{message}; predict with --set strategy.kind=one_device"))
    context = tf.distribute.get_replica_context()
    number, count, first = tf.cast(total, tf.int32), tf.cast(rows, tf.int32), tf.cast(start, tf.int32)
    # the number of rows for each example; a replica without examples has a stand-in row, which is left out
    times = tf.shape(leaf)[0] // tf.maximum(count, 1)
    around = [[first * times, (number - first - count) * times], *[[0, 0]] * (leaf.shape.rank - 1)]
    own = leaf[: count * times]
    if dtype == tf.uint64:
        # no summable dtype holds all values of uint64, but adding zeros keeps the bits unchanged
        own = tf.bitcast(own, tf.int64)
    padded = tf.pad(tf.cast(own, _summable_dtype(own.dtype)), around)
    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, padded)
    return tf.bitcast(sums, dtype) if dtype == tf.uint64 else tf.cast(sums, dtype)


def _summable_dtype(dtype: tf.DType) -> tf.DType:
    """Return a dtype that processes can sum and that holds all values of a dtype."""
    if dtype.name in _SUMMABLE:
        return dtype
    if dtype == tf.uint32:
        return tf.int64
    # float16 and bfloat16 fit into float32, short integers and bool into int32
    return tf.float32 if dtype.is_floating else tf.int32


def concatenate_batches(batches: list[Any]) -> Any:
    """Return the predictions of all batches, concatenated along the rows.

    Raises:
        ConfigError: there are no batches, or their predictions differ in shape.
    """
    if not batches:
        raise ConfigError(Problem(("data",), "the split has no examples to predict"))

    def join(*parts: np.ndarray) -> np.ndarray:
        shapes = sorted({part.shape[1:] for part in parts})
        if len(shapes) > 1:
            message = f"predictions differ in shape from batch to batch: {shapes[0]} and {shapes[1]} for one example"
            raise ConfigError(Problem(("data",), f"{message}; pad all examples to one size"))
        return np.concatenate(parts)

    return keras.tree.map_structure(join, *batches)
