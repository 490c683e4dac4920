"""Finds and reserves ports for tasks on this machine, until the tasks have bound them."""

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

OTHER_PORTS = "choose other ports, or write `ports: auto`"


class ReservedPorts:
    """Reserved ports. Call `release` when the tasks have bound them or have ended."""

    def __init__(self, numbers: Sequence[int], sockets: Sequence[socket.socket]) -> None:
        self.numbers = tuple(numbers)
        self._sockets = list(sockets)

    def release(self) -> None:
        while self._sockets:
            self._sockets.pop().close()


def pick_ports(count: int) -> ReservedPorts:
    """Reserve free ports. The kernel finds and binds each port in one step, so that no other process gets it.

    If there is a port server (`PORTSERVER_ADDRESS`), use the ports that it assigns.
    """
    sockets: list[socket.socket] = []
    try:
        for number in _from_server(count) if "PORTSERVER_ADDRESS" in os.environ else [0] * count:
            sockets.append(hold(number))
    except OSError as error:
        ReservedPorts((), sockets).release()
        raise UsageError(f"found only {len(sockets)} of {count} free ports on this machine: {error}") from None
    return ReservedPorts([each.getsockname()[1] for each in sockets], sockets)


def _from_server(count: int) -> Iterator[int]:
    """Yield ports from a port server. Raise OSError if it has no free port or does not answer."""
    import portpicker

    try:
        for _ in range(count):
            yield portpicker.pick_unused_port()
    except portpicker.NoFreePortFoundError as error:
        raise OSError(str(error)) from None


def reserve_ports(numbers: Sequence[int]) -> ReservedPorts:
    """Reserve the given ports.

    Raises:
        UsageError: ports are in use. The message names them, and the processes that use them if known.
    """
    sockets: list[socket.socket] = []
    busy: list[str] = []
    for number in numbers:
        try:
            # `hold` would also succeed if another socket uses the port with SO_REUSEPORT
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

    # a process of another user cannot be inspected, and a process may just have ended
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
    import psutil  # imported here, since it takes 20 ms

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
    """Return a socket bound to a port that tasks can bind, too. Raise OSError if the port is in use."""
    reserved = _socket()
    try:
        # The socket is bound, so that no other process gets the port. The task binds the same port, also with
        # SO_REUSEPORT. The socket never listens: the kernel would give a second listener some of the task's
        # connections.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", port))
    except OSError:
        reserved.close()
        raise
    return reserved


def _socket() -> socket.socket:
    """Return a socket for all addresses of the machine, for IPv4 and, if available, IPv6."""
    if socket.has_ipv6:
        with contextlib.suppress(OSError):
            both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
            both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            return both
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
