"""The user's functions in both forms: as they are where operations run at once, converted where a graph is traced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs as it is when called eagerly (for debuggers), and through AutoGraph in a graph.

    TensorFlow converts by itself, but not in a dataset that is made inside another, as each pass of a pipeline is.
    """
    if not _has_source(function):
        return function
    try:
        converted = tf.autograph.to_graph(function)
    except NotImplementedError:  # Python 3.13 finds a source of code from `eval`, which is not that of the function
        return function

    @functools.wraps(function)
    def called(*args: Any, **by_name: Any) -> Any:
        return (function if tf.executing_eagerly() else converted)(*args, **by_name)

    return tf.autograph.experimental.do_not_convert(called)


def _has_source(function: Callable[..., Any]) -> bool:
    try:
        return inspect.isfunction(function) and bool(inspect.getsource(function))
    except (OSError, TypeError):
        return False
