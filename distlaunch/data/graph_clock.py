"""Measures time in graphs, because Python can measure only whole calls of many steps.

Each time is read by an operation, with a control dependency on the operations that it must follow. Reading a time takes
about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlaunch.patches.tensorflow_late import not_converted, tf
from distlaunch.patches.tensorflow_private import is_deterministic


@not_converted
def now(after: Any) -> tf.Tensor:
    """Return the time in seconds, a float64 scalar, or 0 under TensorFlow's determinism, which forbids clocks.

    Args:
        after: structure of tensors that must be computed before.
    """
    # without the dependency, the executor may read the clock at any time
    with tf.control_dependencies(tf.nest.flatten(after, expand_composites=True)), tf.device("CPU:0"):
        return tf.constant(0.0, tf.float64) if is_deterministic() else tf.timestamp()


@not_converted
def read_timed(read: Callable[[], Any], after: tf.Tensor, ready: Callable[[Any], Any]) -> tuple[Any, tf.Tensor]:
    """Return the result of `read`, and the seconds that it took.

    Args:
        read: reads an element.
        after: tensor that must be computed before the read begins.
        ready: returns the tensors of an element that show that the read has ended.
    """
    began = now(after)
    # without the dependency, the read could start before the clock is read
    with tf.control_dependencies([began]):
        element = read()
    ended = now(ready(element))
    return _after(ended, element), _seconds(began, ended)


def _after(clock: tf.Tensor, element: Any) -> Any:
    """Return the element with a dependency on the clock.

    Otherwise a single thread that runs operations could compute the step before it reads the clock.
    """
    if tf.executing_eagerly():  # as with `--debug`, where operations run in order
        return element

    def wait(leaf: tf.Tensor) -> tf.Tensor:
        with tf.compat.v1.get_default_graph().colocate_with(leaf), tf.control_dependencies([clock]):
            return tf.identity(leaf)

    return tf.nest.map_structure(wait, element, expand_composites=True)


@not_converted
def time_row(waited: tf.Tensor, began: tf.Tensor, ended: tf.Tensor, rows: Any) -> tf.Tensor:
    """Return the times of a step as a row for `StepTimes.of`.

    Args:
        waited: seconds of waiting for the batch.
        began: time at which the step began.
        ended: time at which the step ended.
        rows: numbers of examples in the step, which are summed.
    """
    with tf.device("CPU:0"):
        return tf.stack([waited, ended - began, tf.cast(tf.add_n(rows), tf.float64)])


@not_converted
def time_rows(num_steps: tf.Tensor) -> tf.TensorArray:
    """Return an array with one row of times for each step of a call; rows of steps that do not run are zeros."""
    with tf.device("CPU:0"):
        return tf.TensorArray(tf.float64, size=num_steps, element_shape=[3])


def _seconds(began: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return ended - began
