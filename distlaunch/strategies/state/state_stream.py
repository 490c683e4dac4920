"""A state from one process to others, over connections of their own: as fast as the network, in pieces, checksummed.

Each receiver shows a secret first, which it has from the key-value store, and gets the bytes of `state_files` and the
SHA-256 of them.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import BinaryIO, Self, cast

from distlaunch.strategies.protocol import State
from distlaunch.strategies.state.state_files import read_state, write_state

_SECRET_BYTES = 32
_GREETING_S = 5.0  # for whoever connects to show that he may
_SILENCE_S = 60.0  # of a peer, in the middle of a state; a lost one is noticed elsewhere, and earlier
_TURN_S = 0.1  # how soon the accepting thread sees that it is over
_UNPROVEN = 256  # connections that may be about to show the secret; more than receivers that come at a time


class StateServer:
    """Gives a state to whoever knows the secret, while it is entered.

    Args:
        host: under which the others reach this process; only what is of this machine alone is listened on as such.

    Attributes:
        port: where it listens.
        secret: what receivers show.
    """

    def __init__(self, state: State, host: str) -> None:
        self._state = state
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._listener = _listen(host)
        self._listener.settimeout(_TURN_S)
        self.port: int = self._listener.getsockname()[1]
        self._over = threading.Event()
        self._unproven: deque[socket.socket] = deque()
        self._has_reported = False
        self._thread = threading.Thread(target=self._accept, name="state")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        # at most `_TURN_S`; states that are still being sent have threads of their own
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # such as too many open files: the receiver reports it
                self._over.wait(_TURN_S)
                continue
            self._unproven.append(connection)
            if len(self._unproven) > _UNPROVEN:  # strangers cannot have any number of threads
                with contextlib.suppress(OSError, IndexError):
                    self._unproven.popleft().shutdown(socket.SHUT_RDWR)
            # one for each receiver: a slow one does not hold up the others
            threading.Thread(target=self._serve, args=(connection, address[0]), name="state", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            with connection, connection.makefile("wb") as file:
                if not self._proves_itself(connection):
                    self._report_refusal(address)
                    return
                connection.settimeout(_SILENCE_S)
                # the checksum comes last: it is known once all has been sent
                file.write(bytes.fromhex(write_state(cast(BinaryIO, file), self._state)))
        except OSError:
            return  # the receiver reports it

    def _proves_itself(self, connection: socket.socket) -> bool:
        until, shown = time.monotonic() + _GREETING_S, b""
        try:
            while len(shown) < _SECRET_BYTES and (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(_SECRET_BYTES - len(shown))
                if not part:
                    break
                shown += part
        except OSError:
            return False
        finally:
            with contextlib.suppress(ValueError):  # there were too many
                self._unproven.remove(connection)
        # takes the same time wherever the first wrong byte is
        return hmac.compare_digest(shown, self.secret)

    def _report_refusal(self, address: str) -> None:
        if not self._has_reported:  # once: a port scan must not fill a log
            self._has_reported = True
            message = f"refused a connection from {address} that asks for the run's state without its secret"
            print(f"distlaunch: {message}; further ones are refused without a word", file=sys.stderr)


def fetch_state(host: str, port: int, secret: bytes) -> State:
    """What a `StateServer` gives.

    Raises:
        OSError: it cannot be reached, or not any more.
        ValueError: what came is not what was sent.
    """
    with socket.create_connection((_bare(host), port), _GREETING_S) as connection:
        connection.settimeout(_SILENCE_S)
        with connection.makefile("rwb") as file:
            file.write(secret)
            file.flush()
            state, sha256 = read_state(cast(BinaryIO, file))
            # two hexadecimal digits a byte
            if file.read(len(sha256) // 2).hex() != sha256:
                raise ValueError("the state was changed on its way")
            return state


def _listen(host: str) -> socket.socket:
    if _is_loopback(host):
        bare = _bare(host)
        # port 0: the kernel chooses a free one
        return socket.create_server((bare, 0), family=socket.AF_INET6 if ":" in bare else socket.AF_INET)
    # the others' name for this host may be none of its own addresses
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(_bare(host)).is_loopback
    except ValueError:
        return host == "localhost"


def _bare(host: str) -> str:
    """Without the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")
