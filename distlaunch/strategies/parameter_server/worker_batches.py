"""Reads global batches by number in a worker's process, and passes them to the graph that runs there.

A parameter-server worker executes graphs that the coordinator sends, but reads its data itself. Its process calls the
config's data function, and the graph requests batches by number. Any worker can process any batch, so another worker
can take over the batches of a dead one, with the same examples. No examples are sent over the network, and Python
generators can be used.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source, num_rows
from distlaunch.data.differences import REASONS, FirstPass, check_passes, describe_duplicates, different_data, kind_of
from distlaunch.data.recorded_rows import Rows
from distlaunch.patches.tensorflow_late import tf
from distlaunch.patches.tensorflow_py_function import answer
from distlaunch.strategies.step_times import StepTimes

Read = Callable[[int, int], Batch]
"""Function of worker index and batch number that returns the batch; a batch without rows marks the end."""


@dataclass(frozen=True)
class OfferedSplit:
    """A split that this process can read.

    Attributes:
        read: returns a batch.
        num_batches: number of batches; None if unknown.
        describe: returns the data's description, see `data/fingerprints.py`.
        first_pass: function of a worker index that returns what the worker's reader knows about its data's length.
        keeps_last: whether the last batch that each worker has read is kept for `last_batch`.
    """

    read: Read
    num_batches: int | None
    describe: Callable[[], str]
    first_pass: Callable[[int], FirstPass] = lambda _: FirstPass()
    keeps_last: bool = False


# the same in all processes
_TOKEN, _DATA_TOKEN, _TIMES_TOKEN = "distlaunch_batch", "distlaunch_data", "distlaunch_times"
_PASS_TOKEN, _LAST_TOKEN = "distlaunch_pass", "distlaunch_last"
_UNKNOWN = -1
_readers: dict[str, OfferedSplit] = {}
_last: dict[tuple[str, int], tuple[int, Batch]] = {}
"""The last batch and its number, by split and worker."""
_lock = threading.Lock()
_failed: list[Exception] = []
_on_failure: list[Callable[[Exception], None]] = []
_on_times: list[Callable[[StepTimes], None]] = []


def offer(split: str, what: OfferedSplit) -> None:
    """Make a split readable for graphs that run in this process."""
    with _lock:
        _readers[split] = what
        # module functions, because TensorFlow holds only weak references to them
        answer(_TOKEN, _read)
        answer(_DATA_TOKEN, _describe_data)
        answer(_TIMES_TOKEN, _receive_times)
        answer(_PASS_TOKEN, _first_pass)
        answer(_LAST_TOKEN, _last_batch)


def offered_split(split: str) -> OfferedSplit:
    """Return a split that was passed to `offer`.

    Raises:
        KeyError: the split was not offered.
    """
    return _readers[split]


def report_failures(to: Callable[[Exception], None]) -> None:
    """Set the function that is called with an error of reading.

    After the call, the graph that requested the batch waits until this process ends.
    """
    _on_failure[:] = [to]


def report_times(to: Callable[[StepTimes], None]) -> None:
    """Set the function that is called with the times of the steps of each block."""
    _on_times[:] = [to]


def read_failure() -> Exception | None:
    """Remove and return the first error of reading in this process, or return None."""
    return _failed.pop(0) if _failed else None


def fetch(source: Source, worker: tf.Tensor, number: tf.Tensor, spec: Any) -> tuple[Batch, tf.Tensor]:
    """Return a batch, in a graph, from the process that runs the graph.

    Args:
        source: the source as the coordinator knows it.
        worker: int64 scalar.
        number: int64 scalar.
        spec: the batch's type specs.

    Returns:
        The batch, and its number of rows (an int64 scalar; 0 after the end).
    """
    parts = tf.nest.flatten(spec, expand_composites=True)
    length = _UNKNOWN if source.num_batches is None else source.num_batches
    # the operation identifies a function by a token, and every process has its own function for the token
    values = tf.raw_ops.PyFunc(
        input=[tf.constant(source.name), worker, number, tf.constant(length, tf.int64)],
        token=_TOKEN,
        Tout=[tf.int64, *(part.dtype for part in parts)],
    )
    rows, *components = values
    rows.set_shape([])
    for component, part in zip(components, parts, strict=True):
        # the results of a Python function have no static shape
        component.set_shape(part.shape)
    batch = tf.nest.pack_sequence_as(spec, components, expand_composites=True)
    # checked here, because the process that reads the batch has no model; see `Source.check`
    return (batch if source.check is None else source.check(batch)), rows


def send_times(rows: tf.Tensor) -> tf.Operation:
    """Send the times of a graph's steps to the process that runs the graph; see `StepTimes.of`."""
    return tf.raw_ops.PyFunc(input=[rows], token=_TIMES_TOKEN, Tout=[])


def first_pass(source: Source, worker: tf.Tensor) -> tf.Tensor:
    """Return the worker and its `FirstPass` as three int64, in a graph, after reading; see `FirstPasses`."""
    [seen] = tf.raw_ops.PyFunc(input=[tf.constant(source.name), worker], token=_PASS_TOKEN, Tout=[tf.int64])
    return tf.concat([[worker], tf.ensure_shape(seen, [2])], 0)


class FirstPasses:
    """Reports of blocks on the data of each worker, by source."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, FirstPass]] = {}

    def add(self, source: Source, reports: Iterable[Sequence[int]]) -> None:
        """Add the results of `first_pass`.

        Raises:
            DataError: the data of a worker has ended, but another worker has read more.
        """
        seen = self._seen.setdefault(source.name, {})
        for worker, length, read in reports:
            name = f"worker:{worker}"
            old = seen.get(name, FirstPass())
            seen[name] = FirstPass(old.length if length == _UNKNOWN else length, max(old.read, read))
        check_passes(seen, kind_of(source.name))


def check_data(source: Source, num_workers: int) -> None:
    """Compare the data of all workers that can answer now; the lengths of the others are checked with each batch.

    Raises:
        ConfigError: a worker's data differs from the coordinator's, or two workers with process-local data have the
            same examples.
    """
    what = kind_of(source.name)
    facts, others = json.loads(source.describe()), {}
    for worker in range(num_workers):
        try:
            with tf.device(f"/job:worker/task:{worker}"):
                [described] = tf.raw_ops.PyFunc(input=[tf.constant(source.name)], token=_DATA_TOKEN, Tout=[tf.string])
            length, description, process = json.loads(described.numpy())
        # a worker that is being restarted, or has not called `offer` yet
        except tf.errors.OpError:
            continue
        if source.num_batches is not None:
            _check_length(source.name, worker, length, source.num_batches)
        seen = json.loads(description)
        others[process] = f"worker:{worker}", seen
        # for process-local data, the coordinator knows only the types
        seen = {name: fact for name, fact in seen.items() if name in facts}
        if wrong := different_data({"chief": {what: json.dumps(facts)}, f"worker:{worker}": {what: json.dumps(seen)}}):
            raise ConfigError(Problem(("data",), wrong))
    # workers within one process give the same answer
    if others and "examples" not in facts and (wrong := describe_duplicates(dict(others.values()))):
        raise ConfigError(Problem(("data",), f"{what}: {wrong}"))


def batch_spec(elements: Any, load: Callable[[Any], Batch]) -> Any:
    """Return the type specs of the batches that `load` makes from elements."""
    return elements.map(lambda *parts: load(parts[0] if len(parts) == 1 else parts)).element_spec


def last_batch(source: Source, number: int, num_workers: int, max_bytes: int) -> Rows | None:
    """Return a batch from a worker that has read it, and no other since; None if there is no such worker.

    Args:
        number: number of the batch.
        max_bytes: size of the largest batch that is sent; the rows of a larger one have no leaves.
    """
    for worker in range(num_workers):
        with contextlib.suppress(tf.errors.OpError), tf.device(f"/job:worker/task:{worker}"):
            asked = [tf.constant(source.name), *(tf.constant(each, tf.int64) for each in (worker, number, max_bytes))]
            [sent] = tf.raw_ops.PyFunc(input=asked, token=_LAST_TOKEN, Tout=[tf.string])
            if content := sent.numpy():
                return Rows.from_bytes(content)
    return None


def _describe_data(split: Any) -> bytes:
    found = offered_split(_text(split))
    return json.dumps([found.num_batches, found.describe(), f"{socket.gethostname()}:{os.getpid()}"]).encode()


def _receive_times(rows: np.ndarray) -> None:
    for report in _on_times:
        report(StepTimes.of(rows))


def _first_pass(split: Any, worker: np.ndarray) -> np.ndarray:
    seen = offered_split(_text(split)).first_pass(int(worker))
    return np.array([_UNKNOWN if seen.length is None else seen.length, seen.read], np.int64)


def _last_batch(split: Any, worker: np.ndarray, number: np.ndarray, max_bytes: np.ndarray) -> bytes:
    at, batch = _last.get((_text(split), int(worker)), (-1, None))
    if at != int(number):
        return b""
    rows = int(num_rows(batch))
    leaves = tf.nest.flatten(batch, expand_composites=True)
    serialized = tuple(bytes(tf.io.serialize_tensor(leaf).numpy()) for leaf in leaves)
    too_large = sum(map(len, serialized)) > int(max_bytes)
    return Rows(at, 0, rows, rows, () if too_large else serialized).to_bytes()


def _text(value: Any) -> str:
    """Return the string that an operation passes as bytes, or as an array of them."""
    return (value if isinstance(value, bytes) else value.item()).decode()


def _read(split: Any, worker: np.ndarray, number: np.ndarray, length: np.ndarray) -> list[Any]:
    name = _text(split)
    try:
        found = offered_split(name)
        _check_length(name, int(worker), found.num_batches, int(length))
        batch = found.read(int(worker), int(number))
    except Exception as error:
        # kept, because TensorFlow's error would not contain the lines of the user's code
        _failed.append(error)
        if _on_failure:
            _on_failure[0](error)
            threading.Event().wait()  # `_on_failure` ends this process
        raise
    if found.keeps_last:
        _last[name, int(worker)] = int(number), batch
    return [np.int64(num_rows(batch)), *(np.asarray(part) for part in tf.nest.flatten(batch, expand_composites=True))]


def _check_length(name: str, worker: int, own: int | None, expected: int) -> None:
    """Raise ConfigError if a worker and the coordinator have different numbers of batches."""
    if expected not in (own, _UNKNOWN):
        has = f"chief has {expected:,} global batches for {kind_of(name)}"
        has = f"{has}; worker:{worker} has {own or 'an unknown number'}"
        raise ConfigError(Problem(("data",), f"the processes read data of different lengths: {has}; {REASONS}"))
