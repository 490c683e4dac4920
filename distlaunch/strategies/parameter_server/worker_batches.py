"""Global batches by number, read in the worker's own process and handed to the graph that runs there.

A parameter-server worker executes graphs that the coordinator sends, but the data stays with it: its process calls the
config's data function, and the graph asks it for batch number so-and-so. Any batch can thus be worked on anywhere, so
that what a dead worker held is done by another, on the same examples; nothing in memory is sent over the network, and
Python generators work.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source, num_rows
from distlaunch.data.differences import REASONS, FirstPass, check_passes, different_data, kind_of, not_own_data
from distlaunch.patches.tensorflow_py_function import answer
from distlaunch.strategies.step_times import StepTimes

Read = Callable[[int, int], Batch]
"""Worker index and batch number -> the batch; one without rows is past the end."""


@dataclass(frozen=True)
class Offered:
    """A split that this process can read.

    Attributes:
        num_batches: None if unknown.
        describe: see `data/fingerprints.py`.
        first_pass: worker index -> what its reader knows of the length of its data.
    """

    read: Read
    num_batches: int | None
    describe: Callable[[], str]
    first_pass: Callable[[int], FirstPass] = lambda _: FirstPass()


# in all processes
_TOKEN, _DATA_TOKEN, _TIMES_TOKEN = "distlaunch_batch", "distlaunch_data", "distlaunch_times"
_PASS_TOKEN = "distlaunch_pass"
_UNKNOWN = -1
_readers: dict[str, Offered] = {}
_lock = threading.Lock()
_failed: list[Exception] = []
_on_failure: list[Callable[[Exception], None]] = []
_on_times: list[Callable[[StepTimes], None]] = []


def offer(split: str, what: Offered) -> None:
    """Lets graphs that run in this process read a split."""
    with _lock:
        _readers[split] = what
        # functions of this module: TensorFlow's table holds them weakly
        answer(_TOKEN, _read)
        answer(_DATA_TOKEN, _data)
        answer(_TIMES_TOKEN, _times)
        answer(_PASS_TOKEN, _first_pass)


def offered(split: str) -> Offered:
    """Return what this process can read of a split; KeyError if it is not offered."""
    return _readers[split]


def report_failures(to: Callable[[Exception], None]) -> None:
    """From now on a failure to read is reported, and the graph that requested it waits for the end of this process."""
    _on_failure[:] = [to]


def report_times(to: Callable[[StepTimes], None]) -> None:
    """From now on the times of the steps of each block are reported."""
    _on_times[:] = [to]


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
        # what a Python function returns has no known shape
        component.set_shape(part.shape)
    batch = tf.nest.pack_sequence_as(spec, components, expand_composites=True)
    # the process that has read it has no model; see `Source.check`
    return (batch if source.check is None else source.check(batch)), rows


def send_times(rows: tf.Tensor) -> tf.Operation:
    """In a graph: how the time of its steps went, to the process that runs it; see `StepTimes.of`."""
    return tf.raw_ops.PyFunc(input=[rows], token=_TIMES_TOKEN, Tout=[])


def first_pass(source: Source, worker: tf.Tensor) -> tf.Tensor:
    """In a graph, after the reading: worker and its `FirstPass`, as three int64; see `FirstPasses`."""
    [seen] = tf.raw_ops.PyFunc(input=[tf.constant(source.name), worker], token=_PASS_TOKEN, Tout=[tf.int64])
    return tf.concat([[worker], tf.ensure_shape(seen, [2])], 0)


class FirstPasses:
    """What blocks have reported of the data of each worker, by source."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, FirstPass]] = {}

    def add(self, source: Source, reports: Iterable[Sequence[int]]) -> None:
        """Takes what `first_pass` has given; raises DataError if the data of a worker ends where another's goes on."""
        seen = self._seen.setdefault(source.name, {})
        for worker, length, read in reports:
            name = f"worker:{worker}"
            old = seen.get(name, FirstPass())
            seen[name] = FirstPass(old.length if length == _UNKNOWN else length, max(old.read, read))
        check_passes(seen, kind_of(source.name))


def check_data(source: Source, num_workers: int) -> None:
    """Asks all workers what data they see; the lengths of who cannot answer now are checked with each batch.

    Raises:
        ConfigError: one sees other data than the coordinator.
    """
    what = kind_of(source.name)
    facts, others = json.loads(source.describe()), {}
    for worker in range(num_workers):
        try:
            with tf.device(f"/job:worker/task:{worker}"):
                [described] = tf.raw_ops.PyFunc(input=[tf.constant(source.name)], token=_DATA_TOKEN, Tout=[tf.string])
            length, description, process = json.loads(described.numpy())
        # a worker that is just being started again, or has not offered its data yet
        except tf.errors.OpError:
            continue
        if source.num_batches is not None:
            _check_length(source.name, worker, length, source.num_batches)
        seen = json.loads(description)
        others[process] = f"worker:{worker}", seen
        # of data that each worker has for itself, the coordinator knows only the types
        seen = {name: fact for name, fact in seen.items() if name in facts}
        if wrong := different_data({"chief": {what: json.dumps(facts)}, f"worker:{worker}": {what: json.dumps(seen)}}):
            raise ConfigError(Problem(("data",), wrong))
    # workers within one process have one answer
    if others and "examples" not in facts and (wrong := not_own_data(dict(others.values()))):
        raise ConfigError(Problem(("data",), f"{what}: {wrong}"))


def batch_spec(elements: Any, load: Callable[[Any], Batch]) -> Any:
    """Type specs of what `load` makes of an element."""
    return elements.map(lambda *parts: load(parts[0] if len(parts) == 1 else parts)).element_spec


def _data(split: Any) -> bytes:
    found = offered(_text(split))
    return json.dumps([found.num_batches, found.describe(), f"{socket.gethostname()}:{os.getpid()}"]).encode()


def _times(rows: np.ndarray) -> None:
    for report in _on_times:
        report(StepTimes.of(rows))


def _first_pass(split: Any, worker: np.ndarray) -> np.ndarray:
    seen = offered(_text(split)).first_pass(int(worker))
    return np.array([_UNKNOWN if seen.length is None else seen.length, seen.read], np.int64)


def _text(value: Any) -> str:
    """What an operation passes: bytes, or an array of them."""
    return (value if isinstance(value, bytes) else value.item()).decode()


def _read(split: Any, worker: np.ndarray, number: np.ndarray, length: np.ndarray) -> list[Any]:
    name = _text(split)
    try:
        found = offered(name)
        _check_length(name, int(worker), found.num_batches, int(length))
        batch = found.read(int(worker), int(number))
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
        has = f"chief has {expected:,} global batches for {kind_of(name)}"
        has = f"{has}; worker:{worker} has {own or 'an unknown number'}"
        raise ConfigError(Problem(("data",), f"the processes read data of different lengths: {has}; {REASONS}"))
