"""Global batches by number, read in the worker's own process and handed to the graph that runs there.

A parameter-server worker executes graphs that the coordinator sends, but the data stays with it: its process calls the
config's data function, and the graph asks it for batch number so-and-so. Any batch can thus be worked on anywhere, so
that what a dead worker held is done by another, on the same examples; nothing in memory is sent over the network, and
Python generators work.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.strategies.data_ends import REASONS
from distlaunch.strategies.patches.tensorflow_py_function import answer
from distlaunch.strategies.protocol import Batch, Source
from distlaunch.strategies.replica.input import num_rows

Read = Callable[[int, int], Batch]
"""Worker index and batch number -> the batch; one without rows is past the end."""

_TOKEN, _LENGTH_TOKEN = "distlaunch_batch", "distlaunch_length"  # the same in all processes
_UNKNOWN = -1
_readers: dict[str, tuple[Read, int | None]] = {}
_lock = threading.Lock()
_failed: list[Exception] = []
_on_failure: list[Callable[[Exception], None]] = []


def offer(split: str, read: Read, num_batches: int | None) -> None:
    """Lets graphs that run in this process read a split, of so many batches if that is known."""
    with _lock:
        _readers[split] = read, num_batches
        answer(_TOKEN, _read)
        answer(_LENGTH_TOKEN, _length)


def tell_failures(to: Callable[[Exception], None]) -> None:
    """From now on a failure to read is told, and the graph that asked waits for the end of this process."""
    _on_failure[:] = [to]


def read_failure() -> Exception | None:
    """What the first failed reading in this process raised, if any; forgotten then."""
    return _failed.pop(0) if _failed else None


def fetch(source: Source, worker: tf.Tensor, number: tf.Tensor, spec: Any) -> tuple[Batch, tf.Tensor]:
    """In a graph: a batch from the process that runs it.

    Args:
        source: as the coordinator knows it.
        worker, number: int64 scalars.
        spec: the batch's type specs.

    Returns:
        The batch, and its rows (an int64 scalar; 0 past the end).
    """
    parts = tf.nest.flatten(spec, expand_composites=True)
    length = _UNKNOWN if source.num_batches is None else source.num_batches
    # the operation names its function by a token, which every process answers with its own
    values = tf.raw_ops.PyFunc(
        input=[tf.constant(source.name), worker, number, tf.constant(length, tf.int64)],
        token=_TOKEN,
        Tout=[tf.int64, *(part.dtype for part in parts)],
    )
    rows, *components = values
    rows.set_shape([])
    for component, part in zip(components, parts, strict=True):
        component.set_shape(part.shape)
    return tf.nest.pack_sequence_as(spec, components, expand_composites=True), rows


def check_lengths(source: Source, num_workers: int) -> None:
    """Asks all workers for the length of their data; who cannot answer now is checked with each batch.

    Raises:
        ConfigError: one has another than the coordinator.
    """
    if source.num_batches is None:
        return
    for worker in range(num_workers):
        try:
            with tf.device(f"/job:worker/task:{worker}"):
                [own] = tf.raw_ops.PyFunc(input=[tf.constant(source.name)], token=_LENGTH_TOKEN, Tout=[tf.int64])
            length = int(own)
        except tf.errors.OpError:
            continue
        _check_length(source.name, worker, None if length == _UNKNOWN else length, source.num_batches)


def batch_spec(elements: Any, load: Callable[[Any], Batch]) -> Any:
    """Type specs of what `load` makes of an element."""
    return elements.map(lambda *parts: load(parts[0] if len(parts) == 1 else parts)).element_spec


def _length(split: Any) -> np.int64:
    _, num_batches = _readers[_text(split)]
    return np.int64(_UNKNOWN if num_batches is None else num_batches)


def _text(value: Any) -> str:
    """What an operation passes: bytes, or an array of them."""
    return (value if isinstance(value, bytes) else value.item()).decode()


def _read(split: Any, worker: np.ndarray, number: np.ndarray, length: np.ndarray) -> list[Any]:
    name = _text(split)
    try:
        read, num_batches = _readers[name]
        _check_length(name, int(worker), num_batches, int(length))
        batch = read(int(worker), int(number))
    except Exception as error:
        # TensorFlow would hand on a text without the user's lines
        _failed.append(error)
        if _on_failure:
            _on_failure[0](error)
            threading.Event().wait()  # this process ends, and says why
        raise
    return [np.int64(num_rows(batch)), *(np.asarray(part) for part in tf.nest.flatten(batch, expand_composites=True))]


def _check_length(name: str, worker: int, own: int | None, expected: int) -> None:
    """Raises ConfigError if this process knows another number of batches than the coordinator."""
    if expected not in (own, _UNKNOWN):
        what = "validation" if name.startswith("validation") else "training"
        has = f"chief has {expected:,} global batches for {what}; worker:{worker} has {own or 'an unknown number'}"
        raise ConfigError(Problem(("data",), f"the processes read data of different lengths: {has}; {REASONS}"))
