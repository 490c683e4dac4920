"""Sums of the processes of one host, here threads, which have the same sockets and memory."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.replica.peer_sums import CollectiveSums
from distlaunch.strategies.replica.shared_memory import SharedMemorySums, connect
from tests.unit.test_peers import DEADLINE_S, in_each

CHUNK = 1 << 20
"""Bytes of a slot."""


_connected: list[SharedMemorySums | None] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the sockets and events of each test at its end."""
    yield
    while _connected:
        if (sums := _connected.pop()) is not None:
            sums.close()


def connections(number: int, rest: type[CollectiveSums] = CollectiveSums) -> list[SharedMemorySums | None]:
    found = in_each(number, lambda peers: connect(peers, rest(is_timed=False)))[0]
    _connected.extend(found)
    return found


def connected(number: int, rest: type[CollectiveSums] = CollectiveSums) -> list[SharedMemorySums]:
    found = [each for each in connections(number, rest) if each is not None]
    assert len(found) == number
    return found


def all_do(sums: list[SharedMemorySums], action: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(sums)) as pool:
        return [done.result(DEADLINE_S) for done in [pool.submit(action, rank) for rank in range(len(sums))]]


@pytest.mark.parametrize("number", [2, 3, 5])
def test_all_get_the_sum_in_the_order_of_ranks(number: int) -> None:
    sums, draw = connected(number), np.random.default_rng(number)
    for size in (1, 7, CHUNK // 4, CHUNK // 4 + 1, 3 * CHUNK // 4 + 5, 0, 2):
        for dtype in (np.float32, np.float64):
            vectors = [draw.normal(size=size).astype(dtype) for _ in range(number)]
            expected = vectors[0].copy()
            for vector in vectors[1:]:
                expected += vector
            for (total,) in all_do(sums, lambda rank, vectors=vectors: sums[rank].exchange(vectors[rank])):
                assert total.dtype == dtype
                np.testing.assert_array_equal(total, expected)


def test_arrays_are_summed_together_across_slots() -> None:
    """The arrays fill the slots one after the other, and each total keeps its own size and is aligned."""
    sums, draw = connected(3), np.random.default_rng(0)
    sizes = [3, CHUNK // 4 - 1, 0, CHUNK // 4 + 5, 2, CHUNK // 2, 1]
    arrays = [[draw.normal(size=size).astype(np.float32) for size in sizes] for _ in range(3)]
    for totals in all_do(sums, lambda rank: sums[rank].exchange(*arrays[rank])):
        for total, first, second, third in zip(totals, *arrays, strict=True):
            np.testing.assert_array_equal(total, first + second + third)
            assert total.size == 0 or total.ctypes.data % 64 == 0


@pytest.mark.parametrize("shapes", [
    [[]], [[2, 3]], [[], [7]], [[100, 100]], [[], [100, 100]], [[100, 100], [3], [200, 50], [2, 2]],
    [[0], [9000]], [[8192], [8191]], [[300, 1000], [4], [1000, 300]],
])  # fmt: skip
def test_tensors_of_all_sizes_in_graphs(shapes: list[list[int]]) -> None:
    """Small tensors are packed into one, and large ones are not."""
    sums, draw = connected(2), np.random.default_rng(0)
    values = [[np.asarray(draw.normal(size=shape), np.float32) for shape in shapes] for _ in range(2)]

    def step(rank: int) -> list[np.ndarray]:
        traced = tf.function(lambda: sums[rank].all_reduce([tf.constant(value) for value in values[rank]]))
        return [total.numpy() for total in traced()]

    for totals in all_do(sums, step):
        for total, first, second in zip(totals, *values, strict=True):
            np.testing.assert_array_equal(total, first + second)


def test_the_order_of_sums_and_the_rest_in_graphs() -> None:
    """Sums that do not depend on each other are made in the same order; TensorFlow sums what NumPy cannot add up."""

    class Rest(CollectiveSums):
        def all_reduce(self, values: Any, *, timed: bool = False) -> list[Any]:
            assert timed
            return list(values)

    sums = connected(2, Rest)

    def step(rank: int) -> tuple[np.ndarray, float]:
        @tf.function
        def traced(count: tf.Tensor) -> Any:
            matrix, scalar = tf.fill([2, 3], rank + 1.0), tf.constant(rank + 0.5, tf.float64)
            half, sparse = tf.constant([1.0], tf.float16), tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]))
            for _ in tf.range(count):
                _, *rest, _ = sums[rank].all_reduce([matrix, half, sparse, scalar], timed=True)
                assert rest == [half, sparse]
                (scalar,) = sums[rank].all_reduce([scalar])
                _, matrix = sums[rank].all_reduce([tf.zeros([0]), matrix], timed=True)
            return matrix, scalar

        matrix, scalar = traced(tf.constant(3))
        return matrix.numpy(), float(scalar)

    for matrix, scalar in all_do(sums, step):
        # 1 + 2, then doubled twice
        np.testing.assert_array_equal(matrix, np.full([2, 3], 12.0))
        assert scalar == 8.0
    assert all(each.waited_s() > 0 for each in sums)


def test_the_end_of_a_process_ends_the_sums_of_the_others() -> None:
    sums = connected(3)
    vector = np.ones(5, np.float32)
    all_do(sums, lambda rank: sums[rank].exchange(vector))
    sums.pop().close()
    _connected.pop()  # is closed
    with pytest.raises(ConnectionResetError, match="Connection closed by peer"):
        all_do(sums, lambda rank: sums[rank].exchange(vector))


def test_sums_of_different_vectors_are_refused() -> None:
    sums = connected(2)
    with pytest.raises(RuntimeError, match="the workers sum different gradients"):
        all_do(sums, lambda rank: sums[rank].exchange(np.ones(5 + rank, np.float32)))


def test_nothing_is_shared_with_processes_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    class FarAway(socket.socket):
        """A socket that cannot reach the second process."""

        def connect(self, address: Any) -> None:
            if str(address).endswith("/1"):
                raise ConnectionRefusedError
            super().connect(address)

    monkeypatch.setattr(socket, "socket", FarAway)
    assert connections(3) == [None] * 3
    assert None not in connections(2)


def test_nothing_is_shared_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert connections(2) == [None] * 2


@pytest.mark.parametrize("name", ["send_fds", "sendall"])
def test_the_end_of_a_process_while_it_connects_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends before it has sent its rank or what is shared is an error of connections for the other."""

    def end(connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_RDWR)

    if name == "send_fds":
        monkeypatch.setattr(socket, "send_fds", lambda connection, messages, fds: end(connection))
    else:
        monkeypatch.setattr(socket.socket, "sendall", lambda connection, message: end(connection), raising=False)

    def connect_each(peers: Peers) -> Any:
        try:
            return connect(peers, CollectiveSums(is_timed=False))
        except Exception as error:
            return error

    errors = [found for found in in_each(2, connect_each)[0] if isinstance(found, Exception)]
    assert errors
    for error in errors:
        assert isinstance(error, ConnectionResetError)
        assert "Connection closed by peer" in str(error)
