"""Converts the user's functions with AutoGraph for graphs, and runs them unconverted otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from distlaunch.patches.tensorflow_late import not_converted, tf


def with_autograph_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs unconverted when called eagerly, as debuggers need, and through AutoGraph in a graph.

    TensorFlow's own conversion does not work in a dataset that is made inside another dataset, such as the dataset of
    one pass.
    """
    if not _has_source(function):
        return function
    try:
        converted = tf.autograph.to_graph(function)
    except NotImplementedError:  # for code from `eval`, Python 3.13 finds the wrong source
        return function

    @functools.wraps(function)
    def called(*args: Any, **by_name: Any) -> Any:
        return (function if tf.executing_eagerly() else converted)(*args, **by_name)

    return not_converted(called)


def _has_source(function: Callable[..., Any]) -> bool:
    try:
        return inspect.isfunction(function) and bool(inspect.getsource(function))
    except (OSError, TypeError):
        return False
