"""Signals to the controller, and requests over its run's control channel, as data to read in its loop."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from distlaunch.base.control import REQUESTS, VERSION, address_of, read_line
from distlaunch.base.errors import StopRequested
from distlaunch.base.signals import DUMP_SIGNAL, JOB_STOP_SIGNALS

_TAKEN = (*JOB_STOP_SIGNALS, signal.SIGCHLD)
_PATIENCE_S = 5.0
"""Seconds for a client to send its request."""
_PRESSES_APART_S = 0.5
"""Two Ctrl-C within a moment would count as one."""
_ACCEPTS_AGAIN_S = 0.1
"""Seconds to wait after a connection could not be accepted."""

_open: list[socket.socket] = []
"""Connections that have been answered. The kernel closes them when this process ends, which their clients wait for."""


class SignalPipe:
    """While entered, signals make `fd` readable and are read from it. To be used in the main thread.

    A signal that was ignored before (`nohup`) stays ignored.

    Args:
        control: the socket through which other processes may ask for the same, and for stacks (SIGUSR2).
    """

    def __init__(self, control: Path | None = None) -> None:
        self._control_path = control
        self._control: ControlChannel | None = None
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            # `signal.set_wakeup_fd` refuses a descriptor that could make a signal wait
            os.set_blocking(fd, False)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._main_thread = 0

    def read(self) -> list[signal.Signals]:
        """Return the signals since the last call, in order, without waiting."""
        try:
            # Python writes one byte for each signal: its number
            return [signal.Signals(number) for number in os.read(self.fd, 4096)]
        except BlockingIOError:
            return []

    def put_back(self, numbers: Sequence[signal.Signals]) -> None:
        """Put signals back, to be read again."""
        for number in numbers:
            self._put(number)

    def asks_to_end(self) -> bool:
        """Return True if a signal asks the job to end; it is not consumed, so that a restart sees it, too."""
        numbers = self.read()
        self.put_back(numbers)
        return any(number in JOB_STOP_SIGNALS for number in numbers)

    def __enter__(self) -> SignalPipe:
        self._main_thread = threading.get_ident()
        # before the handlers: no signal may come between and be lost
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _TAKEN:
            # SIGCHLD ignored would reap children by itself, with their exit codes
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _nothing)
        if self._control_path is not None:
            self._control = ControlChannel(self._control_path, self._request)
        return self

    @contextlib.contextmanager
    def raising(self) -> Generator[None]:
        """Make a signal that asks the job to end raise StopRequested within the block, for code that waits.

        It is read from the pipe as well.
        """
        taken = [number for number in JOB_STOP_SIGNALS if number in self._before]

        def raise_once(number: int, frame: FrameType | None) -> None:
            # a second one must not interrupt what the first has others clean up
            for each in taken:
                signal.signal(each, _nothing)
            raise StopRequested(signal.Signals(number))

        for number in taken:
            signal.signal(number, raise_once)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, _nothing)

    def _request(self, number: signal.Signals) -> None:
        """Handle a request of another process as the signal that it stands for; called in a thread."""
        if number in self._before:
            # as the signal itself: it also ends what waits while `raising` is entered
            signal.pthread_kill(self._main_thread, number)
        else:
            self._put(number)

    def _put(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # it is over
            os.write(self._write_fd, bytes([number]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._control is not None:
            self._control.close()
        for number, handler in self._before.items():
            # a default stays away where it would do harm: with that of SIGCHLD, Python complains if a child ends just
            # then; after a request to end, a second one would kill this process while it cleans up
            was_asked = isinstance(error, StopRequested) and number != signal.SIGINT
            is_harmful = was_asked or (
                handler == signal.SIG_DFL and (number == signal.SIGCHLD or isinstance(error, StopRequested))
            )
            if not is_harmful:
                # None: a handler that was not set from Python
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write_fd)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number has already been written to the pipe."""


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
        """Stop accepting requests."""
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
        """Carry out a request, or answer why not."""
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
            threading.Event().wait(_PRESSES_APART_S)
            self._put(signal.SIGINT)
        elif request == "stacks":
            self._put(DUMP_SIGNAL)
        else:
            return f"got {request!r}; expected one of {', '.join(REQUESTS)}"
        return ""


def _close_abandoned() -> None:
    """Close connections whose clients have gone; each holds a descriptor."""
    poller = select.poll()
    for connection in _open:
        # 0: hang-ups and errors are reported in any case
        poller.register(connection, 0)
    gone = {fd for fd, _ in poller.poll(0)}
    for connection in [each for each in _open if each.fileno() in gone]:
        _open.remove(connection)
        connection.close()
