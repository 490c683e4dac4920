"""Predictions of a whole split: those of replicas put together, and one batch after the other."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import slice_rows
from distlaunch.strategies.replica.row_random import RowPlace, numbers_for

_TRAVELS = (tf.float32, tf.float64, tf.int32, tf.int64)  # types that processes can sum


def make_predict_call(strategy: Any, model: keras.Model, num_processes: int) -> Callable[..., Any]:
    """A function of one element of the input (see `split_rows`): the predictions of the global batch, on the host.

    Several processes sum their parts, each with zeros in the place of the others' rows: so all get all of them.
    """

    def local(batch: Any, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> Any:
        # a layer may draw in predictions, too
        place = RowPlace(start, tf.maximum(tf.cast(rows, tf.int64), 1), tf.cast(total, tf.int64))
        with numbers_for(place):
            # of a number that the trace does not know: by that a draw for rows is told from others
            outputs = model.predict_step(slice_rows(batch, tf.zeros_like(place.rows), place.rows))
        if num_processes == 1:
            return outputs
        return tf.nest.map_structure(lambda leaf: _whole(leaf, rows, total, start), outputs)

    # the last batch is smaller: relaxed shapes trace once more, not once for each size
    @tf.function(autograph=False, reduce_retracing=True)
    def call(element: Any) -> Any:
        return strategy.run(local, args=element)

    def predict(element: Any) -> Any:
        counts = [int(rows) for rows in strategy.experimental_local_results(element[1])]

        def on_host(leaf: Any) -> np.ndarray:
            # in the order of replicas, which is the order of rows
            values = [np.asarray(value) for value in strategy.experimental_local_results(leaf)]
            if num_processes > 1:
                # summed already: each replica has the whole batch
                return values[0]
            # without the stand-in row of a replica that has none
            return np.concatenate([value[:count] for value, count in zip(values, counts, strict=True)])

        return tf.nest.map_structure(on_host, call(element))

    return predict


def _whole(leaf: tf.Tensor, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """The predictions of all replicas, from those of this one."""
    dtype = leaf.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        message = f"the model predicts {dtype.name}, which processes cannot send each other"
        raise ConfigError(Problem(("model", "function"), f"{message}; predict with --set strategy.kind=one_device"))
    context = tf.distribute.get_replica_context()
    number, count, first = tf.cast(total, tf.int32), tf.cast(rows, tf.int32), tf.cast(start, tf.int32)
    around = [[first, number - first - count], *[[0, 0]] * (leaf.shape.rank - 1)]
    own = leaf[:count]
    if dtype == tf.uint64:
        # no type that can be summed holds all its values; bits beside zeros stay what they are
        own = tf.bitcast(own, tf.int64)
    padded = tf.pad(tf.cast(own, _travelling(own.dtype)), around)
    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, padded)
    return tf.bitcast(sums, dtype) if dtype == tf.uint64 else tf.cast(sums, dtype)


def _travelling(dtype: tf.DType) -> tf.DType:
    """The type that values are summed in, which holds all of them."""
    if dtype in _TRAVELS:
        return dtype
    if dtype == tf.uint32:
        return tf.int64
    # float16 and bfloat16 fit into float32, short integers and bool into int32
    return tf.float32 if dtype.is_floating else tf.int32


def concatenated(batches: list[Any]) -> Any:
    """The predictions of all batches, one after the other.

    Raises:
        ConfigError: there are none, or they differ in shape.
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
