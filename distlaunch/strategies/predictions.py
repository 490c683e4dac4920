"""Predicts for a whole split, batch by batch, and combines the predictions of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    examples. With several replicas, the function raises ConfigError in all processes if that order is unknown, because
    the number of rows is not a multiple of the number of examples, or if the replicas predict other shapes.
    """

    def local(batch: Any, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor) -> Any:
        # layers may draw random numbers in predictions too
        place = RowPlace(start, tf.maximum(tf.cast(rows, tf.int64), 1), tf.cast(total, tf.int64))
        with draw_for_rows(place):
            # the slice makes the number of rows unknown in the trace, so that `draw_for_rows` recognizes draws for rows
            outputs = model.predict_step(slice_rows(batch, tf.zeros_like(place.rows), place.rows))
        shapes = tf.nest.map_structure(lambda leaf: _shape_of_rows(leaf, rows), outputs)
        if num_processes > 1:
            shapes = tf.nest.map_structure(_from_all_replicas, shapes)
            add_up = functools.partial(_sum_over_processes, rows=rows, total=total, start=start)
            outputs = tf.nest.map_structure(add_up, outputs, shapes)
        return outputs, shapes

    # relaxed shapes, so that one more trace serves smaller batches of any size
    @tf.function(autograph=False, reduce_retracing=True)
    def call(element: Any) -> Any:
        return strategy.run(local, args=element)

    def predict(element: Any) -> Any:
        counts = [int(rows) for rows in strategy.experimental_local_results(element[1])]

        def on_host(leaf: Any, shapes: Any) -> np.ndarray:
            # in the order of replicas, which is the order of rows
            values = [np.asarray(value) for value in strategy.experimental_local_results(leaf)]
            if strategy.num_replicas_in_sync > 1:
                known = [np.asarray(each) for each in strategy.experimental_local_results(shapes)]
                _check_shapes(known[0] if num_processes > 1 else np.concatenate(known))
            if num_processes > 1:
                # each replica has the sum, which is the whole batch
                return values[0]
            # without the stand-in row of a replica without rows
            return np.concatenate([value for value, count in zip(values, counts, strict=True) if count])

        outputs, shapes = call(element)
        return tf.nest.map_structure(on_host, outputs, shapes)

    return predict


def _shape_of_rows(leaf: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return the number of a replica's examples and the shape of its predictions, as [1, 1 + rank].

    All of them are 0 for a replica without examples, whose stand-in row may have another shape.
    """
    count = tf.cast(rows, tf.int32)
    shape = tf.concat([[count], tf.shape(leaf)], axis=0)[None]
    return tf.where(count > 0, shape, tf.zeros_like(shape))


def _check_shapes(shapes: np.ndarray) -> None:
    """Raise ConfigError unless all replicas predict the same for each example: a whole number of rows of one shape.

    Args:
        shapes: the result of `_shape_of_rows` for each replica: [replicas, 1 + rank].
    """
    known = shapes[shapes[:, 0] > 0]
    lengths = {length / count for count, length in known[:, :2]}
    if len(lengths) > 1 or not all(length.is_integer() for length in lengths):
        of_replicas = " and ".join(f"{length} for {count}" for count, length in known[:, :2])
        message = (
            f"the model predicts a number of rows that does not follow from the number of examples ({of_replicas})"
        )
        hint = "return the same number of rows for each example"
    elif len(of_rows := {tuple(map(int, shape)) for shape in known[:, 2:]}) > 1:
        message = f"the predictions of the replicas differ in shape ({' and '.join(map(str, sorted(of_rows)))})"
        hint = "pad all examples to one size"
    else:
        return
    place = ("model", "function")
    raise ConfigError(
        Problem(
            place,
            f"{message}, so replicas cannot share a batch; predict with --set strategy.kind=one_device, or {hint}",
        )
    )


def _from_all_replicas(shape: tf.Tensor) -> tf.Tensor:
    """Return a row of each replica, in the order of the replicas."""
    context = tf.distribute.get_replica_context()
    at = context.replica_id_in_sync_group
    padded = tf.pad(shape, [[at, context.num_replicas_in_sync - 1 - at], [0, 0]])
    return context.all_reduce(tf.distribute.ReduceOp.SUM, padded)


def _sum_over_processes(
    leaf: tf.Tensor, shapes: tf.Tensor, rows: tf.Tensor, total: tf.Tensor, start: tf.Tensor
) -> tf.Tensor:
    """Return the predictions of all replicas, given those of one.

    The result has no rows if `_check_shapes` refuses the shapes: the sum of different shapes ends all processes.
    """
    dtype = leaf.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        message = f"the model predicts {dtype.name}, which processes cannot exchange"
        raise ConfigError(Problem(("model", "function"), f"{message}; predict with --set strategy.kind=one_device"))
    context = tf.distribute.get_replica_context()
    number, count, first = tf.cast(total, tf.int32), tf.cast(rows, tf.int32), tf.cast(start, tf.int32)
    times, of_row, agree = _shape_for_each_example(shapes)
    # a stand-in row may have another shape than the others, and is left out
    own = tf.cond(count > 0, lambda: leaf[: count * times], lambda: tf.zeros(tf.concat([[0], of_row], axis=0), dtype))
    if dtype == tf.uint64:
        # no summable dtype holds all values of uint64, but adding zeros keeps the bits unchanged
        own = tf.bitcast(own, tf.int64)
    own = tf.cast(own, _summable_dtype(own.dtype))
    around = [[first * times, (number - first - count) * times], *[[0, 0]] * (leaf.shape.rank - 1)]
    # all processes take the same branch, since they have the same shapes
    padded = tf.cond(agree, lambda: tf.pad(own, around), lambda: tf.zeros([0] * leaf.shape.rank, own.dtype))
    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, padded)
    return tf.bitcast(sums, dtype) if dtype == tf.uint64 else tf.cast(sums, dtype)


def _shape_for_each_example(shapes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the number of rows for each example, the shape of a row, and whether `_check_shapes` accepts all this."""
    known = tf.boolean_mask(shapes, shapes[:, 0] > 0)
    times = known[:, 1] // known[:, 0]
    is_whole = tf.reduce_all(times * known[:, 0] == known[:, 1])
    agree = is_whole & tf.reduce_all(times == times[0]) & tf.reduce_all(known[:, 2:] == known[:1, 2:])
    return times[0], known[0, 2:], agree


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
