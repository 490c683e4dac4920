"""Tests whether hosts reach each other: a host listens on the reserved ports of its tasks, and the others connect.

The listening sockets are closed before a task starts. If they stayed open, they would get some of the task's
connections.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distlaunch.cluster.ports import hold

TOKEN_BYTES = 16
_RETRY_S = 1.0
"""Seconds between connection attempts. If a network loses packets, the kernel itself retries less and less often."""


class Target(NamedTuple):
    """An address of another host.

    Attributes:
        token: the expected answer, which a different host at the same address does not know. Empty to expect no answer.
    """

    address: str
    port: int
    token: str


class _Round:
    """The targets of one request, and the connection attempts to them.

    Args:
        ends_at: when to stop trying.
        done: called with the indices of the targets that were not reached.
    """

    def __init__(self, targets: Sequence[Target], ends_at: float, done: Callable[[list[int]], None]) -> None:
        self.targets, self.ends_at, self.done = targets, ends_at, done
        self.left = set(range(len(targets)))
        self.tried_at = float("-inf")
        self.tries: dict[socket.socket, tuple[int, bytearray]] = {}


class Prober:
    """Listens and connects without blocking. `fileno` becomes readable when `turn` has something to do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[socket.socket, bytes] = {}
        self._rounds: list[_Round] = []

    def fileno(self) -> int:
        assert isinstance(self._selector, selectors.EpollSelector)
        return self._selector.fileno()

    @property
    def is_busy(self) -> bool:
        return bool(self._rounds)

    def listen(self, ports: Sequence[int], token: str) -> None:
        """Listen on ports and answer each connection with the token. Raise OSError if a port is in use."""
        for port in ports:
            listener = hold(port)
            listener.setblocking(False)
            listener.listen()
            self._listeners[listener] = token.encode()
            self._selector.register(listener, selectors.EVENT_READ)

    def close_listeners(self) -> None:
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()

    def probe(self, targets: Sequence[Target], seconds: float, done: Callable[[list[int]], None]) -> None:
        """Connect to targets, and call back with the indices of those that were not reached."""
        self._rounds.append(_Round(targets, self._clock() + seconds, done))

    def turn(self) -> None:
        """Make progress without waiting."""
        for key, _ in self._selector.select(0):
            each = key.fileobj
            assert isinstance(each, socket.socket)
            if each in self._listeners:
                self._answer(each)
            else:
                self._read(each)
        now = self._clock()
        for one in list(self._rounds):
            if not one.left or now >= one.ends_at:
                self._finish(one)
            elif now - one.tried_at >= _RETRY_S:
                one.tried_at = now
                for number in one.left:
                    self._connect(one, number)

    def close(self) -> None:
        self.close_listeners()
        for one in list(self._rounds):
            self._rounds.remove(one)
            for each in list(one.tries):
                self._drop(one, each)
        self._selector.close()

    def _answer(self, listener: socket.socket) -> None:
        # the other side has disconnected, or there are too many connections
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.setblocking(False)
                connection.send(self._listeners[listener])

    def _connect(self, one: _Round, number: int) -> None:
        target = one.targets[number]
        family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
        with contextlib.suppress(OSError):  # this host does not support the address family
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            connection.connect_ex((target.address, target.port))
            one.tries[connection] = number, bytearray()
            # a socket becomes writable when it is connected or refused
            self._selector.register(connection, selectors.EVENT_READ if target.token else selectors.EVENT_WRITE)

    def _read(self, connection: socket.socket) -> None:
        one = next((one for one in self._rounds if connection in one.tries), None)
        if one is None:
            return
        number, received = one.tries[connection]
        if not one.targets[number].token:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                one.left.discard(number)
            self._drop(one, connection)
            return
        try:
            data = connection.recv(TOKEN_BYTES)
        except BlockingIOError:
            return
        except OSError:  # refused, no route
            data = b""
        received += data
        if data and len(received) < TOKEN_BYTES:
            return
        self._drop(one, connection)
        if received.decode(errors="replace") == one.targets[number].token:
            one.left.discard(number)

    def _finish(self, one: _Round) -> None:
        self._rounds.remove(one)
        for each in list(one.tries):
            self._drop(one, each)
        one.done(sorted(one.left))

    def _drop(self, one: _Round, connection: socket.socket) -> None:
        del one.tries[connection]
        self._selector.unregister(connection)
        connection.close()
