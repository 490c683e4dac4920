"""Distributes a checkpoint's state from the chief, which has read it, to all other processes.

The first of these ways that is possible is used:

1. From a shared disk. A process on the chief's host maps the file that the chief has verified. If there are several
   files, or the file is on another host's disk, the process maps a copy in memory instead. A process on another host
   reads and verifies the parts of the files that it needs.
2. Without a shared disk, from the chief over separate connections. Each process requests the bytes that it needs, and
   verifies them with checksums. It gets the checksums, and a secret for the connection, from the key-value store.
3. If no connection is possible, because only the ports of the cluster are open, through the key-value store. This is
   slow: for four processes, it takes more than a hundred times as long as one read.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from pydantic import TypeAdapter

from distlaunch.base.local_disks import is_local_disk
from distlaunch.checkpoints.format import buffers_of, header_bytes, names_by_position, read_header
from distlaunch.checkpoints.state_files import (
    Bytes,
    DiskFile,
    NeededBlocks,
    Shapes,
    StateFile,
    StateFiles,
    read_bytes,
    read_files,
)
from distlaunch.strategies.state import State

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import Strategy  # imports Keras

_REQUEST = struct.Struct("!IQQ")
"""Number of the file, offset, number of bytes."""
_SECRET_BYTES = 32
_SENT_BYTES = 1 << 20  # bytes per call
_GREETING_S = 5.0  # time for a new connection to send the secret
_SILENCE_S = 60.0  # timeout of a connection; the death of a process is noticed earlier, elsewhere
_POLL_S = 0.1  # delay until the accepting thread notices that it must end
_MAX_CONNECTIONS = 4  # connections of a receiver
_MAX_UNPROVEN = 256  # connections that have not sent the secret yet; receivers never have so many at a time


@dataclass(frozen=True)
class MappedFile:
    """A file with the whole verified state that processes of the same host can map.

    Attributes:
        path: path of the open file, below /proc.
        identity: identifies the file, because in a container the path may lead to another file.
    """

    path: str
    identity: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointLocation:
    """Location of a state that the chief has verified, for other processes.

    Attributes:
        folder: absolute path of the checkpoint.
        files: the files of the state.
        host: the chief's host, see `this_host`.
        mapped: a file that processes on the same host can map, or None.
    """

    folder: str
    files: tuple[StateFile, ...]
    host: str
    mapped: MappedFile | None

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> CheckpointLocation:
        return TypeAdapter(CheckpointLocation).validate_python(plain)

    def read(self, needed: NeededBlocks | None = None) -> State | None:
        """Return the state, or None if this process cannot read it there.

        Args:
            needed: blocks of variables that this process needs; the other values may be zero.
        """
        if self.mapped is not None and self.host == this_host():
            with contextlib.suppress(OSError, ValueError), Path(self.mapped.path).open("rb") as file:
                if _identity(file.fileno()) == self.mapped.identity:
                    return _private_state(file.fileno())
        with contextlib.suppress(OSError, ValueError), StateFiles.on_disk(Path(self.folder), self.files) as files:
            return files.read(needed)
        return None


class ChiefState:
    """State of a checkpoint in the chief, from which other processes can read it until it is closed.

    Call `read` first. The arrays remain valid after `close`.

    Args:
        on_this_host: whether other processes on this host need the state.

    Attributes:
        location: location of the state for other processes; None before `read`.
        state: the state that was read last.
    """

    def __init__(self, *, on_this_host: bool = False) -> None:
        self._on_this_host = on_this_host and hasattr(os, "memfd_create")
        self._files: StateFiles | None = None
        self._mapped: int | None = None
        self.location: CheckpointLocation | None = None
        self.state: State | None = None

    def read(self, folder: Path, files: Sequence[StateFile]) -> State:
        """Return the verified state of a folder, and keep its files open.

        Raises:
            FileDamagedError, OSError: see `StateFiles.read`.
        """
        self.close()  # the files of a checkpoint that was tried before
        self._files, mapped = StateFiles.on_disk(folder, files), None
        if self._on_this_host:
            self._mapped = self._mappable(folder, self._files)
            mapped = MappedFile(f"/proc/{os.getpid()}/fd/{self._mapped}", _identity(self._mapped))
            self.state = _private_state(self._mapped)
        else:
            self.state = self._files.read()
        self.location = CheckpointLocation(os.path.abspath(folder), tuple(files), this_host(), mapped)
        return self.state

    def _mappable(self, folder: Path, files: StateFiles) -> int:
        """Return the descriptor of an unchanging file that contains the whole state."""
        [content, *_] = files.contents
        if files.is_one and isinstance(content, DiskFile) and is_local_disk(folder):
            # files of checkpoints are never changed, and an open file can be used after it is deleted
            files.verify()
            return os.dup(content.fileno())
        copy = os.memfd_create("distlaunch-state")
        try:
            if files.is_one:
                files.verify(copy_to=copy)
            else:
                files.read(allocate=functools.partial(_allocate, copy))
        except BaseException:
            os.close(copy)
            raise
        return copy

    @property
    def contents(self) -> list[Bytes]:
        """The bytes of the files."""
        assert self._files is not None, "`read` was called"
        return self._files.contents

    def close(self) -> None:
        files, self._files, mapped, self._mapped, self.state = self._files, None, self._mapped, None, None
        if files is not None:
            files.close()
        if mapped is not None:
            os.close(mapped)


def share_state(
    strategy: Strategy,
    location: CheckpointLocation,
    chief: ChiefState | None,
    needed: NeededBlocks | None = None,
) -> State:
    """Return the state in each process. Every process must call this.

    Args:
        chief: the state in the chief; None in other processes.
        needed: see `CheckpointLocation.read`.

    Raises:
        FileDamagedError: the bytes received from the chief do not match the checksums.
    """
    state = location.read(needed) if chief is None else chief.state
    lacks = _any_process_lacks(strategy, state)
    if lacks and chief is not None:
        with StateServer(chief.contents, strategy.chief_host) as server:
            strategy.from_chief(json.dumps([server.port, server.secret.hex()]).encode())
            lacks = _any_process_lacks(strategy, state)  # waits until all processes have tried to connect
    elif lacks:
        port, secret = json.loads(strategy.from_chief(b""))
        if state is None:
            # if the chief is not reachable, or bytes were changed on the way, the store is used next
            with contextlib.suppress(OSError, ValueError):
                state = fetch_state(strategy.chief_host, port, bytes.fromhex(secret), location.files, needed)
        lacks = _any_process_lacks(strategy, state)
    if lacks:
        with tempfile.TemporaryDirectory() as folder:
            for number, file in enumerate(location.files):
                data = b"" if chief is None else read_bytes(chief.contents[number], file.num_bytes)
                data = strategy.from_chief(data)
                if state is None:
                    (Path(folder) / file.name).write_bytes(data)
            state = state if state is not None else read_files(Path(folder), location.files, needed)
    assert state is not None, "the last way raises an error if it fails"
    return state


def _any_process_lacks(strategy: Strategy, state: State | None) -> bool:
    return any(strategy.gather("" if state is not None else "missing").values())


class StateServer:
    """Sends bytes of files to processes that know a secret, within its context.

    Args:
        contents: the bytes of each file.
        host: address at which the others reach this process. The server listens on all addresses, unless this is a
            loopback address.

    Attributes:
        port: port of the server.
        secret: the secret that receivers must send.
    """

    def __init__(self, contents: Sequence[Bytes], host: str) -> None:
        self._contents = contents
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._listener = _listen(host)
        self._listener.settimeout(_POLL_S)
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
        # takes at most `_POLL_S`; the threads of connections end with their connections
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # for example because of too many open files; the receiver reports it
                self._over.wait(_POLL_S)
                continue
            self._unproven.append(connection)
            if len(self._unproven) > _MAX_UNPROVEN:  # limits the threads for connections without the secret
                with contextlib.suppress(OSError, IndexError):
                    self._unproven.popleft().shutdown(socket.SHUT_RDWR)
            # one thread for each receiver, so that a slow one does not delay the others
            threading.Thread(target=self._serve, args=(connection, address[0]), name="state", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with contextlib.suppress(OSError, ValueError), connection:  # the receiver reports a lost connection
            if not self._proves_itself(connection):
                self._report_refusal(address)
                return
            connection.settimeout(_SILENCE_S)
            buffer = memoryview(bytearray(_SENT_BYTES))
            while not self._over.is_set() and (request := _received(connection, _REQUEST.size)):
                number, at, num_bytes = _REQUEST.unpack(request)
                if number >= len(self._contents):
                    return
                while num_bytes:
                    found = self._contents[number].read_into([buffer[: min(num_bytes, _SENT_BYTES)]], at)
                    if not found:  # the receiver notices that bytes are missing
                        return
                    connection.sendall(buffer[:found])
                    at, num_bytes = at + found, num_bytes - found

    def _proves_itself(self, connection: socket.socket) -> bool:
        try:
            shown = _received(connection, _SECRET_BYTES, time.monotonic() + _GREETING_S)
        except OSError:
            return False
        finally:
            with contextlib.suppress(ValueError):  # removed already, because there were too many
                self._unproven.remove(connection)
        # takes the same time for every wrong secret
        return hmac.compare_digest(shown, self.secret)

    def _report_refusal(self, address: str) -> None:
        if not self._has_reported:  # only once, so that a port scan does not fill the log
            self._has_reported = True
            message = f"refused a connection from {address} that requests the run's state without its secret"
            print(f"distlaunch: {message}; further ones are refused silently", file=sys.stderr)


def _received(connection: socket.socket, num_bytes: int, until: float | None = None) -> bytes:
    """Return this number of bytes, or b"" if the connection ends earlier.

    Args:
        until: monotonic time by which all bytes must have been received.
    """
    data = b""
    while len(data) < num_bytes:
        if until is not None:
            connection.settimeout(max(until - time.monotonic(), 1e-3))
            if time.monotonic() >= until:
                return b""
        part = connection.recv(num_bytes - len(data))
        if not part:
            return b""
        data += part
    return data


def fetch_state(
    host: str, port: int, secret: bytes, files: Sequence[StateFile], needed: NeededBlocks | None = None
) -> State:
    """Return the state in the files of a `StateServer`.

    Raises:
        OSError: the server cannot be reached, or the connection is lost.
        FileDamagedError: the received bytes do not match the checksums.
    """
    with contextlib.ExitStack() as stack:
        connections = _Connections((_without_brackets(host), port), secret)
        stack.callback(connections.close)
        remote = [lambda number=number: _RemoteFile(connections, number, files) for number in range(len(files))]
        return stack.enter_context(StateFiles(files, remote)).read(needed)


class _Connections:
    """Connections to a server, for threads that read at the same time."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address, self._secret = address, secret
        self._idle: deque[socket.socket] = deque()
        self._limit = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[socket.socket]:
        with self._limit:
            connection = self._idle.pop() if self._idle else self._connected()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._address, _GREETING_S)
        connection.settimeout(_SILENCE_S)
        connection.sendall(self._secret)
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _RemoteFile:
    """Implements `Bytes` for a file of the chief."""

    def __init__(self, connections: _Connections, number: int, files: Sequence[StateFile]) -> None:
        self._connections, self._number, self._num_bytes = connections, number, files[number].num_bytes

    def size(self) -> int:
        return self._num_bytes

    def read_into(self, buffers: list[memoryview], offset: int) -> int:
        wanted = sum(map(len, buffers))
        with self._connections.borrow() as connection:
            connection.sendall(_REQUEST.pack(self._number, offset, wanted))
            for buffer in buffers:
                at = 0
                while at < len(buffer):
                    received = connection.recv_into(buffer[at:])
                    if not received:
                        raise ConnectionError("the chief has ended the connection")
                    at += received
        return wanted

    def close(self) -> None: ...


def _listen(host: str) -> socket.socket:
    if _is_loopback(host):
        bare = _without_brackets(host)
        # port 0: the kernel chooses a free one
        return socket.create_server((bare, 0), family=socket.AF_INET6 if ":" in bare else socket.AF_INET)
    # other hosts may use a name for this host that is not one of its addresses
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be disabled
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(_without_brackets(host)).is_loopback
    except ValueError:
        return host == "localhost"


def _without_brackets(host: str) -> str:
    """Return an address without the brackets of IPv6."""
    return host.removeprefix("[").removesuffix("]")


@functools.cache
def this_host() -> str:
    """Return an identifier of this host that is the same in all its containers, as the kernel's device numbers are."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {uuid.getnode()}"


# memory that maps a state and has the layout of a state file, including the header


def _allocate(fd: int, shapes: Shapes) -> State:
    """Return empty arrays in shared memory."""
    head, *arrays = buffers_of({name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}, {})
    os.ftruncate(fd, len(head) + sum(map(len, arrays)))
    os.pwrite(fd, head, 0)
    return _arrays(mmap.mmap(fd, 0))


def _private_state(fd: int) -> State:
    """Return the state in a file as a private mapping, in which changes are not shared between processes."""
    return _arrays(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def _arrays(memory: mmap.mmap) -> State:
    length = header_bytes(memory[:8])
    entries = read_header(memory[8 : 8 + length])
    found = {}
    for name in names_by_position(entries):
        entry = entries[name]
        flat = np.frombuffer(memory, np.uint8, entry.end - entry.begin, 8 + length + entry.begin)
        found[name] = flat.view(entry.dtype).reshape(entry.shape)
    return {name: found[name] for name in entries}


def _identity(fd: int) -> tuple[int, ...]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size
