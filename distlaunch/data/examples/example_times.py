"""How long reading and mapping an example takes: measured in the input pipeline, and reported to Python once per batch.

Of the whole process: what is to be known is what its training waits for, and what else reads meanwhile is left out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.data.graph_clock import now


@dataclass(frozen=True)
class ExampleTimes:
    """Times measured so far in this process.

    Attributes:
        examples: number of examples that were read and mapped.
        seconds: sum of their times; several run at the same time.
        batches_s: seconds spent on making batches of them.
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
    so_far = ExampleTimes()
    pauses = 0


def measured() -> ExampleTimes:
    """Return the times of this process so far."""
    return _Sums.so_far


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Do not count what is read within the block: it is not read for training."""
    with _Sums.lock:
        _Sums.pauses += 1
    try:
        yield
    finally:
        with _Sums.lock:
            _Sums.pauses -= 1


def timed(one: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `one` for `Dataset.map` so that it also returns the seconds that it takes."""

    @tf.autograph.experimental.do_not_convert
    def both(*parts: Any) -> tuple[Any, tf.Tensor]:
        began = now(parts)
        with tf.control_dependencies([began]):
            made = one(*parts)
        return made, now(made) - began

    return both


@tf.autograph.experimental.do_not_convert
def counted(batch: Any, seconds: tf.Tensor, began: tf.Tensor, at_once: int) -> Any:
    """Count a batch and return it; runs in a graph.

    Args:
        seconds: of each example.
        began: when the batch was begun.
        at_once: how many are made at the same time; this one's part of that time counts.
    """
    known = tf.numpy_function(_note, [seconds, (now(batch) - began) / at_once], tf.bool)
    with tf.control_dependencies([known]):
        return tf.nest.map_structure(tf.identity, batch)


def _note(seconds: np.ndarray, batch_s: np.ndarray) -> np.bool_:
    with _Sums.lock:
        if not _Sums.pauses and batch_s > 0:
            was = _Sums.so_far
            made, took = was.examples + seconds.size, was.seconds + float(seconds.sum())
            _Sums.so_far = ExampleTimes(made, took, was.batches_s + float(batch_s))
    return np.True_
