"""Time in graphs: Python sees a call of many steps begin and end, and nothing of what is in between.

Each time is taken by an operation that is tied to what it must come after. It costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from distlaunch.patches.tensorflow_private import is_deterministic


@tf.autograph.experimental.do_not_convert
def now(after: Any) -> tf.Tensor:
    """Return the time in seconds, a float64 scalar; 0 under TensorFlow's determinism, which forbids clocks.

    Args:
        after: tensors that are there by then, in any structure.
    """
    # without the dependency the executor may take the time whenever it likes
    with tf.control_dependencies(tf.nest.flatten(after, expand_composites=True)), tf.device("CPU:0"):
        return tf.constant(0.0, tf.float64) if is_deterministic() else tf.timestamp()


@tf.autograph.experimental.do_not_convert
def read_timed(read: Callable[[], Any], after: tf.Tensor, ready: Callable[[Any], Any]) -> tuple[Any, tf.Tensor]:
    """Return the result of `read`, and the seconds that it took.

    Args:
        after: it begins when this tensor is there.
        ready: the tensors with which what was read is complete.
    """
    began = now(after)
    # else the read could start before the clock is read: nothing else ties the two
    with tf.control_dependencies([began]):
        element = read()
    return element, _seconds(began, now(ready(element)))


@tf.autograph.experimental.do_not_convert
def time_row(waited: tf.Tensor, began: tf.Tensor, ended: tf.Tensor, rows: Any) -> tf.Tensor:
    """Return the times of a step as `StepTimes.of` expects them.

    Args:
        rows: how many examples it had; numbers that are summed.
    """
    with tf.device("CPU:0"):
        return tf.stack([waited, ended - began, tf.cast(tf.add_n(rows), tf.float64)])


@tf.autograph.experimental.do_not_convert
def time_rows(num_steps: tf.Tensor) -> tf.TensorArray:
    """Return the times of a call from a row for each step; steps that were not made are zeros."""
    with tf.device("CPU:0"):
        return tf.TensorArray(tf.float64, size=num_steps, element_shape=[3])


def _seconds(began: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return ended - began
