"""Ports for tasks on this machine: free ones, held until the tasks have bound them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from distlaunch.base.errors import UsageError

REUSE_ENV = {"TF_GRPC_REUSE_PORT": "1"}
"""Variable that lets TensorFlow bind a port that this process holds."""

OTHER_PORTS = "choose another one, or write `ports: auto`"


class ReservedPorts:
    """Ports that nobody else gets. `release` after the tasks have bound them, or are gone."""

    def __init__(self, numbers: Sequence[int], sockets: Sequence[socket.socket]) -> None:
        self.numbers = tuple(numbers)
        self._sockets = list(sockets)

    def release(self) -> None:
        while self._sockets:
            self._sockets.pop().close()


def pick_ports(count: int) -> ReservedPorts:
    """Return free ports, found and held in one step by the kernel, so that no other process gets the same.

    Where a port server hands out the machine's ports (`PORTSERVER_ADDRESS`), it is asked.
    """
    sockets: list[socket.socket] = []
    try:
        for number in _from_server(count) if "PORTSERVER_ADDRESS" in os.environ else [0] * count:
            sockets.append(hold(number))
    except OSError as error:
        ReservedPorts((), sockets).release()
        raise UsageError(f"found only {len(sockets)} free ports on this machine, {count} are needed: {error}") from None
    return ReservedPorts([each.getsockname()[1] for each in sockets], sockets)


def _from_server(count: int) -> Iterator[int]:
    """Return ports from a port server. Raise OSError if it does not answer."""
    import portpicker

    try:
        for _ in range(count):
            yield portpicker.pick_unused_port()
    except portpicker.NoFreePortFoundError as error:
        raise OSError(str(error)) from None


def reserve_ports(numbers: Sequence[int]) -> ReservedPorts:
    """Hold exactly these ports. Raise UsageError that names those in use and, if known, the processes that use them."""
    sockets: list[socket.socket] = []
    busy: list[str] = []
    for number in numbers:
        try:
            # `hold` alone would succeed beside another socket with SO_REUSEPORT
            _check_free(number)
            sockets.append(hold(number))
        except OSError as error:
            busy.append(_refusal(number, error))
    if busy:
        ReservedPorts((), sockets).release()
        raise UsageError(f"cluster.ports: {'; '.join(busy)}; {OTHER_PORTS}")
    return ReservedPorts(numbers, sockets)


def port_problem(number: int) -> str | None:
    """Return why a port of this machine cannot be used now, or None."""
    try:
        _check_free(number)
    except OSError as error:
        return _refusal(number, error)
    return None


def _refusal(number: int, error: OSError) -> str:
    if error.errno == errno.EACCES:
        return f"port {number} is for administrators only (choose one above 1023)"
    holder = find_holder(number)
    return f"port {number} is in use" + (f" by {holder}" if holder else "")


def find_holder(port: int) -> str | None:
    """Return the process that listens on a port, such as `process 4711 (python)`, or None if it is not visible."""
    import psutil

    # another user's process, or one that has just ended, cannot be looked into
    with contextlib.suppress(psutil.Error):
        for number, pid in _listeners():
            if number == port and pid is not None:
                return f"process {pid} ({psutil.Process(pid).name()})"
    return None


def listening_ports() -> set[int]:
    """Return the TCP ports of this machine on which a process listens."""
    return {port for port, _ in _listeners()}


def _listeners() -> list[tuple[int, int | None]]:
    """Return the port of each listening socket and its process, if visible."""
    import psutil  # only where it is needed: it costs 20 ms

    try:
        found: list[Any] = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return []
    return [(each.laddr.port, each.pid) for each in found if each.status == psutil.CONN_LISTEN]


def _check_free(port: int) -> None:
    """Bind a port exclusively to check that it is free; connections in TIME_WAIT do not count."""
    with _socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def hold(port: int) -> socket.socket:
    """Return a socket bound to a port, which this process and its tasks can share. Raise OSError if it is in use."""
    reserved = _socket()
    try:
        # Bound, so that nobody else gets it, and shared with the task, which binds it the same way. Never listening:
        # the kernel would hand this socket a share of the task's connections.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", port))
    except OSError:
        reserved.close()
        raise
    return reserved


def _socket() -> socket.socket:
    """Return a socket for all addresses of the machine, of both families if it has both."""
    if socket.has_ipv6:
        with contextlib.suppress(OSError):
            both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
            both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            return both
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
