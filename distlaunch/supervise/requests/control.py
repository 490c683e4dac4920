"""The controller's end of a run's control channel: a thread that turns requests into what the main loop reads."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from distlaunch.base.control import REQUESTS, VERSION, address_of, read_line
from distlaunch.base.signals import DUMP_SIGNAL

_PATIENCE_S = 5.0
"""How long a client may take to say what it wants."""
PRESSES_APART_S = 0.5
"""Two Ctrl-C within a moment would count as one."""
_ACCEPTS_AGAIN_S = 0.1
"""After a connection could not be accepted."""

_open: list[socket.socket] = []
"""Connections that have been answered. The kernel closes them when this process ends, which their clients wait for."""


class ControlChannel:
    """Takes requests until it is closed. Where no socket can be made, there is no channel, and the run goes on.

    Args:
        put: takes the signal that a request stands for; called in a thread.
    """

    def __init__(self, path: Path, put: Callable[[signal.Signals], None]) -> None:
        self._path, self._put = path, put
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._over = threading.Event()
        try:
            # whoever made the old one is gone: the caller holds the run's lock
            path.unlink(missing_ok=True)
            with address_of(path) as address:
                self._listener.bind(address)
            # only the user who runs the job may stop it
            path.chmod(0o600)
            self._listener.listen()  # nobody can connect before this
        except OSError:
            self._listener.close()
            return
        threading.Thread(target=self._serve, name="control", daemon=True).start()

    def close(self) -> None:
        """Takes no more requests."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept` in the thread
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or such as too many open files: the client waits for its answer meanwhile
                _close_abandoned()
                self._over.wait(_ACCEPTS_AGAIN_S)
                continue
            # one client at a time: a silent one must not keep out the others
            connection.settimeout(_PATIENCE_S)
            try:
                refused = self._take(read_line(connection))
                connection.sendall(json.dumps({"refused": refused} if refused else {}).encode() + b"\n")
                _close_abandoned()
                _open.append(connection)
            except OSError:  # a client that is gone, or says nothing
                connection.close()

    def _take(self, line: bytes) -> str:
        """Does what is asked, or says why not."""
        try:
            asked = json.loads(line)
            version, request = asked["version"], asked["request"]
        except (ValueError, KeyError, TypeError):
            return "expected a line of JSON with 'version' and 'request'"
        if version != VERSION:
            return f"the run's controller speaks version {VERSION} of the protocol, not {version}"
        if request == "stop":
            self._put(signal.SIGTERM)
        elif request == "stop-now":
            self._put(signal.SIGINT)
            threading.Event().wait(PRESSES_APART_S)
            self._put(signal.SIGINT)
        elif request == "stacks":
            self._put(DUMP_SIGNAL)
        else:
            return f"got {request!r}; expected one of {', '.join(REQUESTS)}"
        return ""


def _close_abandoned() -> None:
    """Closes connections whose clients are gone; each would keep a descriptor."""
    poller = select.poll()
    for connection in _open:
        # 0: hang-ups and errors are reported in any case
        poller.register(connection, 0)
    gone = {fd for fd, _ in poller.poll(0)}
    for connection in [each for each in _open if each.fileno() in gone]:
        _open.remove(connection)
        connection.close()
