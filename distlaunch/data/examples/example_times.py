"""Measures the time for reading and mapping examples in the input pipeline, and reports it to Python for each batch.

The sums are for the whole process. Only examples that training reads count; see `not_for_training`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlaunch.data.graph_clock import now
from distlaunch.patches.tensorflow_late import not_converted, tf


@dataclass(frozen=True)
class ExampleTimes:
    """Times measured so far in this process.

    Attributes:
        examples: number of examples that were read and mapped.
        seconds: sum of the times of these examples, of which several may be read at the same time.
        batches_s: seconds for making batches of them.
    """

    examples: int = 0
    seconds: float = 0.0
    batches_s: float = 0.0

    def __sub__(self, before: ExampleTimes) -> ExampleTimes:
        return ExampleTimes(
            self.examples - before.examples, self.seconds - before.seconds, self.batches_s - before.batches_s
        )


class _Sums:
    lock = threading.Lock()
    total = ExampleTimes()
    pauses = 0


def example_times_so_far() -> ExampleTimes:
    """Return the times of this process so far."""
    return _Sums.total


@contextlib.contextmanager
def not_for_training() -> Iterator[None]:
    """Do not count examples that are read in this context, because they are not for training."""
    with _Sums.lock:
        _Sums.pauses += 1
    try:
        yield
    finally:
        with _Sums.lock:
            _Sums.pauses -= 1


def with_duration(one: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for `Dataset.map` that calls `one` and also returns its duration in seconds."""

    @not_converted
    def both(*parts: Any) -> tuple[Any, tf.Tensor]:
        began = now(parts)
        with tf.control_dependencies([began]):
            made = one(*parts)
        return made, now(made) - began

    return both


def add_times(seconds: Sequence[float], batch_s: float) -> None:
    """Add the times of a batch to the sums.

    Args:
        seconds: duration of each example.
        batch_s: duration of the batch.
    """
    _add(np.array(seconds, np.float64), np.float64(batch_s))


@not_converted
def add_batch_times(batch: Any, seconds: tf.Tensor, began: tf.Tensor, at_once: int) -> Any:
    """Add the times of a batch to the sums, in a graph, and return the batch.

    Args:
        seconds: duration of each example.
        began: time at which the batch began.
        at_once: number of batches that are made at the same time; the duration of the batch is divided by it.
    """
    known = tf.numpy_function(_add, [seconds, (now(batch) - began) / at_once], tf.bool)
    with tf.control_dependencies([known]):
        return tf.nest.map_structure(tf.identity, batch)


def _add(seconds: np.ndarray, batch_s: Any) -> np.bool_:
    with _Sums.lock:
        if not _Sums.pauses and batch_s > 0:
            was = _Sums.total
            made, took = was.examples + seconds.size, was.seconds + float(seconds.sum())
            _Sums.total = ExampleTimes(made, took, was.batches_s + float(batch_s))
    return np.True_
