"""Reasons why examples could not be read. TensorFlow passes on a text without the lines of the user's code."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.code_origins import user_line
from distlaunch.base.errors import DataError

Find = Callable[[np.ndarray], tuple[str, Exception] | None]
"""Of the examples that rows stand for, int64, the first that fails when it is done by itself, and with what."""

_lock = threading.Lock()
_first: list[Exception] = []
_latest: deque[tuple[Find, np.ndarray]] = deque(maxlen=8)
"""The rows that were begun last, more than are under way at a time."""


@contextlib.contextmanager
def reading(what: str = "", *, keep: bool = True) -> Iterator[None]:
    """Turn an error into a DataError that says what cannot be read.

    Args:
        what: is being read, e.g. `example 17`, for the message; empty: the error says it.
        keep: for `data_errors_raised`, where TensorFlow hands on a text; the first of this process is reported.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}{user_line(error)}"
        told = not what or (isinstance(error, DataError) and _names(reason, what))
        failure = DataError(f"data: {reason}" if told else f"data: {what} cannot be read: {reason}")
        failure.__cause__ = error
        if keep:
            with _lock:
                _first.append(failure)
        raise failure from error


def _names(reason: str, what: str) -> bool:
    """Return whether a reason begins as the message about `what` would: `example 4,711 cannot be read`."""
    kind, _, number = what.rpartition(" ")
    found = re.match(r"(?:data: )?(.*?) ([\d,]+) cannot be read\b", reason)
    return found is not None and kind.endswith(found[1]) and found[2].replace(",", "") == number


def noted(rows: tf.Tensor, find: Find) -> tf.Tensor:
    """Return the rows, and remember them together with a function that finds the one that fails; runs in a graph."""

    def note(values: np.ndarray) -> np.ndarray:
        _latest.append((find, values))
        return values

    same = tf.numpy_function(note, [rows], rows.dtype)
    same.set_shape(rows.shape)
    return same


def quiet_function(function: Callable[..., Any], inputs: Any, types: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Like `tf.numpy_function`, but without the traceback that TensorFlow logs for each exception."""
    if tf.executing_eagerly():  # whoever asks by hand wants the exception
        return function(*map(np.asarray, inputs))

    def call(*arguments: Any) -> list[Any]:
        try:
            values = function(*arguments)
            return [np.True_, *(values if isinstance(values, (list, tuple)) else [values])]
        except Exception:
            return [np.False_, *(np.zeros([], dtype.as_numpy_dtype) for dtype in types)]

    good, *values = tf.numpy_function(call, inputs, [tf.bool, *types])
    with tf.control_dependencies([tf.debugging.Assert(good, ["the function has raised an exception"])]):
        return [tf.identity(value) for value in values]


@contextlib.contextmanager
def data_errors_raised() -> Iterator[None]:
    """Raise a DataError with the reason in place of an error of an operation that could not read an example."""
    try:
        yield
    except tf.errors.OpError as error:
        with _lock:
            # another pass, which has read ahead, may have failed too
            named = [failure for failure in _first if str(failure) in error.message]
            failure = next(iter(named or _first), None)
            _first.clear()
        failure = failure or _found() or _of_pipeline(error.message)
        if failure is None:
            raise
        raise failure from failure.__cause__


def _of_pipeline(message: str) -> Exception | None:
    """Return the DataError for a pipeline that cannot make batches or write the file of `cache`."""
    if found := re.search(r"cache lockfile already exists \('(.+)_\d+\.lockfile'\)", message):
        cause = "another task or run writes it, or one that was killed has left its lockfile"
        hint = "keep it in memory with .cache(), or give each task a file of its own, whose name ends with "
        hint += "distlaunch.task().index; where nothing writes it any more, delete the lockfile"
        return DataError(f"data: the pipeline caches in the file '{found[1]}', but {cause}; {hint}")
    shapes = r"Cannot batch tensors with different shapes in component (\d+)\. First element had shape (\[.*?\]) and "
    if found := re.search(shapes + r"element (\d+) had shape (\[.*?\])", message):
        what = f"value {found[1]} of an example has shape {found[2]}, and that of another in the batch {found[4]}"
        hint = "pad them to batches in the pipeline with .padded_batch(...), and write `batched: true`"
        return DataError(f"data: {what}; {hint}")
    if found := re.search(r"(\S+)_\d+\.lockfile; No such file or directory", message):
        return DataError(f"data: the pipeline caches in the file '{found[1]}', whose folder does not exist; make it")
    return None


def explained(what: str, error: Exception) -> Exception:
    """Return the DataError that says why a single example could not be read or mapped.

    Args:
        what: the example, e.g. `example 17`.
    """
    if isinstance(error, DataError):
        return error
    failure = DataError(f"data: {what} cannot be used: {_reason(error)}{user_line(error)}")
    failure.__cause__ = error
    return failure


def _found() -> Exception | None:
    """Return the example with which an operation of `data.map`, or one that decodes, fails."""
    latest = list(_latest)
    _latest.clear()
    for find, rows in latest:
        if (found := find(rows)) is not None:
            return explained(*found)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, tf.errors.OpError):
        # of an exception in a Python function the message has the whole traceback
        return error.message.partition("\nTraceback (")[0].partition(" [Op:")[0].rpartition("}} ")[2].strip()
    return f"{type(error).__name__}: {error}"
