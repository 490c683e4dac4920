"""Finds out why examples could not be read, because TensorFlow's errors do not contain lines of the user's code."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distlaunch.base.code_origins import user_line
from distlaunch.base.errors import DataError
from distlaunch.patches.tensorflow_late import is_a, tf

Find = Callable[[np.ndarray], tuple[str, Exception] | None]
"""Function that reads the examples of int64 rows one by one, and returns name and error of the first that fails."""

_lock = threading.Lock()
_first: list[Exception] = []
_latest: deque[tuple[Find, np.ndarray]] = deque(maxlen=8)
"""Rows of the latest batches, at least as many batches as are read at the same time."""


@contextlib.contextmanager
def reading(what: str = "", *, keep: bool = True) -> Iterator[None]:
    """Raise a DataError, which names the example that cannot be read, instead of another error.

    Args:
        what: name of the example, such as `example 17`; empty if the error contains it.
        keep: whether to store the error for `data_errors_raised`, since TensorFlow passes on only its text.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}{user_line(error)}"
        contains_name = not what or (isinstance(error, DataError) and _names(reason, what))
        failure = DataError(f"data: {reason}" if contains_name else f"data: {what} cannot be read: {reason}")
        failure.__cause__ = error
        if keep:
            with _lock:
                _first.append(failure)
        raise failure from error


def _names(reason: str, what: str) -> bool:
    """Return whether a reason already begins with the name `what`, as in `example 4,711 cannot be read`."""
    kind, _, number = what.rpartition(" ")
    found = re.match(r"(?:data: )?(.*?) ([\d,]+) cannot be read\b", reason)
    return found is not None and kind.endswith(found[1]) and found[2].replace(",", "") == number


def remember_rows(rows: tf.Tensor, find: Find) -> tf.Tensor:
    """Return the rows, in a graph, and remember them with a function that finds the row that fails."""

    def note(values: np.ndarray) -> np.ndarray:
        _latest.append((find, values))
        return values

    same = tf.numpy_function(note, [rows], rows.dtype)
    same.set_shape(rows.shape)
    return same


def numpy_function_without_traceback(
    function: Callable[..., Any], inputs: Any, types: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Call a Python function like `tf.numpy_function`, without the traceback that TensorFlow logs for exceptions."""
    if tf.executing_eagerly():  # raise exceptions directly
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
    """Raise a DataError with the reason instead of the error of an operation that could not read an example."""
    try:
        yield
    except Exception as error:
        if not is_a(error, "errors.OpError"):
            raise
        message = str(getattr(error, "message", ""))
        with _lock:
            # prefer a failure that this error quotes, since another pass that reads ahead may have failed too
            named = [failure for failure in _first if str(failure) in message]
            failure = next(iter(named or _first), None)
            _first.clear()
        failure = failure or _find_failed_example() or _explain_pipeline_error(message)
        if failure is None:
            raise
        raise failure from failure.__cause__


def forget_failures() -> None:
    """Forget the failures and the rows of an earlier training in this process, which do not explain later errors."""
    with _lock:
        _first.clear()
    _latest.clear()


def _explain_pipeline_error(message: str) -> Exception | None:
    """Return the DataError for a pipeline that cannot make batches or write the file of `cache`, else None."""
    if found := re.search(r"cache lockfile already exists \('(.+)_\d+\.lockfile'\)", message):
        cause = "another task or run is writing it, or was killed and has left its lockfile"
        hint = "cache in memory with .cache(), or give each task its own file, whose name ends with "
        hint += "distlaunch.task().index; if no process writes the file any longer, delete the lockfile"
        return DataError(f"data: the pipeline caches in the file '{found[1]}', but {cause}; {hint}")
    shapes = r"Cannot batch tensors with different shapes in component (\d+)\. First element had shape (\[.*?\]) and "
    if found := re.search(shapes + r"element (\d+) had shape (\[.*?\])", message):
        what = f"value {found[1]} of an example has shape {found[2]}, but that of another in the batch has {found[4]}"
        hint = "make padded batches in the pipeline with .padded_batch(...), and write `batched: true`"
        return DataError(f"data: {what}; {hint}")
    if found := re.search(r"(\S+)_\d+\.lockfile; No such file or directory", message):
        return DataError(f"data: the pipeline caches in the file '{found[1]}', whose folder does not exist; create it")
    return None


def explain(what: str, error: Exception) -> Exception:
    """Return a DataError with the reason why a single example could not be read or mapped.

    Args:
        what: name of the example, such as `example 17`.
    """
    if isinstance(error, DataError):
        return error
    failure = DataError(f"data: {what} cannot be used: {_reason(error)}{user_line(error)}")
    failure.__cause__ = error
    return failure


def _find_failed_example() -> Exception | None:
    """Return the error of the example that cannot be decoded or mapped, among the latest rows; None if not found."""
    latest = list(_latest)
    _latest.clear()
    for find, rows in latest:
        if (found := find(rows)) is not None:
            return explain(*found)
    return None


def _reason(error: Exception) -> str:
    if is_a(error, "errors.OpError"):
        # for an exception in a Python function, the message contains the whole traceback
        message = str(getattr(error, "message", ""))
        return message.partition("\nTraceback (")[0].partition(" [Op:")[0].rpartition("}} ")[2].strip()
    return f"{type(error).__name__}: {error}"
