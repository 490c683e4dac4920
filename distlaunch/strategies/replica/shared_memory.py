"""Sums tensors over the processes of one host through shared memory.

TensorFlow's collectives send tensors between CPU processes by gRPC. For two processes and 100,000 to 1,000,000 numbers,
this takes about three times as long as writing them to shared memory and adding them up.

Each process writes its numbers to a slot of its own, signals the others, waits for their signals, and adds up all slots
in the order of ranks. So all processes get the same bits; with two processes, they are also those of TensorFlow's ring,
since the sum of two numbers does not depend on their order. The end of a process ends its sockets, which fails the sums
of the others at once.

The memory has no name, and the sockets are in Linux's abstract namespace, so no file is left behind.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.replica.peer_sums import CollectiveSums

_CHUNK_BYTES = 1 << 20
"""Size of a slot. More numbers are summed in chunks, so that slots stay in the cache of the CPU."""
_PACKED_BELOW = 1 << 13
"""Number of elements below which tensors are packed into one."""
_ALIGNMENT = 64
"""Alignment in bytes of the memory of TensorFlow's tensors."""
_SLOTS = 2
"""Number of slots of each process, used in turn: before a process writes to a slot again, all processes have met once
more, so they have read its last contents."""
_TIMEOUT_S = 60.0
"""Time in which the processes must connect. They have met right before."""
_HEADER_BYTES = 64
"""Size of the header of a slot, which has the index of the exchange and the size of all arrays in bytes."""
_CREDENTIALS = struct.Struct("3i")
"""Linux's `struct ucred`: process, user and group ID."""
_RANK = struct.Struct("<I")


def _peer_ended() -> ConnectionResetError:
    return ConnectionResetError("Connection closed by peer: another worker has ended")


class _Peer:
    """Another process.

    The signals are eventfds, which count, so an early signal is not lost. No data is sent through the connection.

    Args:
        connection: ends when the other process ends, which shows that no signal will come.
        signal: eventfd that this process writes.
        wakeup: eventfd that the other process writes.
    """

    def __init__(self, connection: socket.socket, signal: int, wakeup: int) -> None:
        self._connection, self._signal, self._wakeup = connection, signal, wakeup
        self._poll = select.poll()
        self._poll.register(wakeup, select.POLLIN)
        self._poll.register(connection, select.POLLIN)

    def signal(self) -> None:
        os.eventfd_write(self._signal, 1)

    def wait(self) -> None:
        """Wait for a signal. Raise ConnectionResetError if the process has ended without one."""
        if self._wakeup not in dict(self._poll.poll()):
            raise _peer_ended()
        os.eventfd_read(self._wakeup)

    def close(self) -> None:
        self._connection.close()
        for eventfd in (self._signal, self._wakeup):
            os.close(eventfd)


class SharedMemorySums:
    """Sums over the processes of one host; see `ReplicaSums`.

    Args:
        rest: sums the values that NumPy cannot add up, such as those of 16 bits and sparse ones.
        memory: memory of at least `memory_bytes(number)` bytes that all processes share.
        others: the other processes.
    """

    def __init__(self, memory: mmap.mmap, others: Sequence[_Peer], rank: int, rest: CollectiveSums) -> None:
        self._others, self._rank, self._rest, self._turn = others, rank, rest, 0
        shared = np.frombuffer(memory, np.uint8).reshape(_SLOTS, len(others) + 1, _HEADER_BYTES + _CHUNK_BYTES)
        self._headers, self._slots = shared[:, :, :16].view(np.uint64), shared[:, :, _HEADER_BYTES:]
        self._waited_s = 0.0
        with tf.device("CPU:0"):
            self._order = tf.Variable(tf.constant(0), trainable=False, name="order_of_sums")

    def all_reduce(self, values: Sequence[Any], *, timed: bool = False) -> list[Any]:
        summed: dict[int, Any] = {}
        for dtype in (tf.float32, tf.float64):
            at = [index for index, value in enumerate(values) if _can_add(value) and value.dtype == dtype]
            if at:
                summed.update(zip(at, self._sum([values[index] for index in at], timed=timed), strict=True))
        rest = [index for index in range(len(values)) if index not in summed]
        if rest:
            found = self._rest.all_reduce([values[index] for index in rest], timed=timed)
            summed.update(zip(rest, found, strict=True))
        return [summed[index] for index in range(len(values))]

    def waited_s(self) -> float | None:
        return self._waited_s + (self._rest.waited_s() or 0.0)

    def close(self) -> None:
        """End the connections. The sums of the other processes then fail."""
        for other in self._others:
            other.close()

    def _sum(self, values: list[tf.Tensor], *, timed: bool) -> list[tf.Tensor]:
        sizes: list[int] = [value.shape.num_elements() or 0 for value in values]
        # a call per array costs more than a copy of a few numbers, and less than a copy of many
        small = [index for index, size in enumerate(sizes) if size < _PACKED_BELOW]
        groups = [small] if small else []
        groups += [[index] for index, size in enumerate(sizes) if size >= _PACKED_BELOW]
        summed: dict[int, tf.Tensor] = {}
        with tf.device("CPU:0"):
            flat = [tf.reshape(value, [-1]) for value in values]
            arrays = [tf.concat([flat[index] for index in group], 0) for group in groups]
            # the processes must make their sums in the same order, even if no sum depends on another
            with tf.control_dependencies([self._order.read_value()]):
                exchange = self._exchange_timed if timed else self.exchange
                totals = tf.numpy_function(exchange, arrays, [array.dtype for array in arrays])
            with tf.control_dependencies(totals):
                self._order.assign_add(1)
            for group, total in zip(groups, totals, strict=True):
                summed.update(zip(group, tf.split(total, [sizes[index] for index in group]), strict=True))
            return [tf.reshape(summed[index], value.shape) for index, value in enumerate(values)]

    def _exchange_timed(self, *arrays: np.ndarray) -> list[np.ndarray]:
        began = time.perf_counter()
        try:
            return self.exchange(*arrays)
        finally:
            self._waited_s += time.perf_counter() - began

    def exchange(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return the sums of the arrays of all processes.

        Args:
            arrays: arrays of one type, shape [numbers], with the same sizes in all processes.

        Raises:
            ConnectionError: another process has ended.
            RuntimeError: another process sums arrays of another size.
        """
        dtype, totals = arrays[0].dtype, _aligned_like(arrays)
        num_bytes = sum(array.nbytes for array in arrays)
        for chunk in _chunks(tuple(array.size for array in arrays), _CHUNK_BYTES // dtype.itemsize):
            slots = self._slots[self._turn % _SLOTS].view(dtype)
            for index, part, place in chunk:
                np.copyto(slots[self._rank, place], arrays[index][part])
            self._meet(num_bytes)
            for index, part, place in chunk:
                out = totals[index][part]
                np.add(slots[0, place], slots[1, place], out=out)
                for other in slots[2:, place]:
                    np.add(out, other, out=out)
        return totals

    def _meet(self, num_bytes: int) -> None:
        """Wait until all processes have written their slots."""
        headers = self._headers[self._turn % _SLOTS]
        headers[self._rank] = (self._turn, num_bytes)
        for other in self._others:
            other.signal()
        for other in self._others:
            other.wait()
        if (headers != headers[self._rank]).any():
            raise RuntimeError(f"the workers sum different gradients; [exchange, bytes] of each: {headers.tolist()}")
        self._turn += 1


@functools.lru_cache(maxsize=64)
def _chunks(sizes: tuple[int, ...], length: int) -> list[list[tuple[int, slice, slice]]]:
    """Divide arrays into chunks that fit a slot.

    Args:
        sizes: numbers of elements of the arrays.
        length: number of elements that fit a slot.

    Returns:
        For each chunk, its parts: the index of an array, the part's place in the array, and its place in the slot.
    """
    chunks: list[list[tuple[int, slice, slice]]] = []
    free = 0
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if not free:
                chunks.append([])
                free = length
            number, at = min(size - begin, free), length - free
            chunks[-1].append((index, slice(begin, begin + number), slice(at, at + number)))
            begin, free = begin + number, free - number
    return chunks


def _aligned_like(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return uninitialized arrays with the same sizes and types, aligned so that TensorFlow need not copy them."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    memory = np.empty(sum(sizes) + _ALIGNMENT, np.uint8)
    at, found = -memory.ctypes.data % _ALIGNMENT, []
    for array, size in zip(arrays, sizes, strict=True):
        found.append(memory[at : at + array.nbytes].view(array.dtype))
        at += size
    return found


def _can_add(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.is_fully_defined()


def memory_bytes(number: int) -> int:
    """Return the size of the memory that a number of processes share."""
    return _SLOTS * number * (_HEADER_BYTES + _CHUNK_BYTES)


def connect(peers: Peers, rest: CollectiveSums) -> SharedMemorySums | None:
    """Connect the processes; return None in all of them if that fails, as on several hosts. Every process must call it.

    Args:
        rest: see `SharedMemorySums`.

    Raises:
        OSError: the connections were made, but another process has ended.
    """
    token = peers.from_chief(secrets.token_hex(16).encode() if peers.is_chief else b"").decode()
    size = memory_bytes(peers.number)
    with contextlib.ExitStack() as stack:
        listening = _listen(token, peers.rank)
        if listening is not None:
            stack.enter_context(listening)
        memory = _make_memory(size) if peers.is_chief else None
        if memory is not None:
            stack.callback(os.close, memory)
        is_ready = listening is not None and (memory is not None or not peers.is_chief)
        if not _all(peers, is_ready):
            return None
        sockets = _connect_to_lower(token, peers.rank)
        if not _all(peers, sockets is not None):
            return None
        assert listening is not None, "checked in all processes"
        assert sockets is not None, "checked in all processes"
        while len(sockets) < peers.number - 1:
            other, _ = listening.accept()
            _check_user(other)
            message = other.recv(_RANK.size, socket.MSG_WAITALL)
            if len(message) < _RANK.size:
                raise _peer_ended()
            (rank,) = _RANK.unpack(message)
            sockets[rank] = other
        others = []
        for rank, connection in sorted(sockets.items()):
            # the lower one of two processes makes what they share
            if rank > peers.rank:
                signal, wakeup = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for _ in range(2))
                shared = [wakeup, signal, *([] if memory is None else [memory])]
                socket.send_fds(connection, [b"."], shared)
            else:
                _, received, _, _ = socket.recv_fds(connection, 1, 3)
                if not received:
                    raise _peer_ended()
                signal, wakeup, *more = received
                if rank == 0:
                    (memory,) = more
                    stack.callback(os.close, memory)
            others.append(_Peer(connection, signal, wakeup))
        assert memory is not None, "the chief has sent it"
        # the mapping stays when the descriptor is closed
        return SharedMemorySums(mmap.mmap(memory, size), others, peers.rank, rest)


def _all(peers: Peers, is_true: bool) -> bool:
    return "no" not in peers.gather("yes" if is_true else "no")


def _address(token: str, rank: int) -> str:
    return f"\0distlaunch/{token}/{rank}"


def _make_memory(size: int) -> int | None:
    """Return a descriptor of memory without a name; None if it cannot be made."""
    try:
        memory = os.memfd_create("distlaunch")
        os.posix_fallocate(memory, 0, size)  # now, because a lack of memory at a write would kill the process
    except (AttributeError, OSError):  # not on Linux, or not enough memory
        return None
    return memory


def _listen(token: str, rank: int) -> socket.socket | None:
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(_address(token, rank))
        listening.listen()
    except OSError:  # not on Linux
        listening.close()
        return None
    listening.settimeout(_TIMEOUT_S)
    return listening


def _connect_to_lower(token: str, rank: int) -> dict[int, socket.socket] | None:
    """Connect to all processes of lower rank; return None if one cannot be reached or belongs to another user.

    A process on another host or in another network namespace cannot be reached.
    """
    found: dict[int, socket.socket] = {}
    try:
        for lower in range(rank):
            found[lower] = connection = socket.socket(socket.AF_UNIX)
            connection.connect(_address(token, lower))
            _check_user(connection)
            connection.sendall(_RANK.pack(rank))
    except OSError:
        for connection in found.values():
            connection.close()
        return None
    return found


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError if a process of another user is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError(f"a process of user {user} has connected")
