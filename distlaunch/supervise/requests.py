"""Signals to the launcher and requests over its run's control channel, as data that its loop reads."""

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
from distlaunch.supervise.late_signals import LateSignals

_HANDLED_SIGNALS = (*JOB_STOP_SIGNALS, signal.SIGCHLD)
_REQUEST_TIMEOUT_S = 5.0
"""Seconds within which a client must send its request."""
_CTRL_C_INTERVAL_S = 0.5
"""Seconds between two simulated Ctrl-C: without a pause, they would count as one."""
_ACCEPT_RETRY_S = 0.1
"""Seconds to wait after a connection could not be accepted."""

_answered: list[socket.socket] = []
"""Connections that have been answered. Their clients wait until the kernel closes them at the end of this process."""


class SignalPipe:
    """A pipe from which signals are read. While this object is entered, a signal makes `fd` readable.

    Use it in the main thread. A signal that was ignored before (`nohup`) stays ignored. A pipe that is never entered
    may be used in any thread: it only gets the signals of `put_back`.

    Args:
        control: path of the socket on which other processes may request the effect of a signal: to stop, or to write
            stacks (SIGUSR2). None for no socket.
        late: handles the stop signals after a job that has ended without an exception; None to restore the earlier
            handlers.
    """

    def __init__(self, control: Path | None = None, late: LateSignals | None = None) -> None:
        self._late = late
        self._control_path = control
        self._control: ControlChannel | None = None
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            # `signal.set_wakeup_fd` accepts only non-blocking descriptors
            os.set_blocking(fd, False)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._main_thread = 0

    def read(self) -> list[signal.Signals]:
        """Return the signals since the last call, in their order. Never waits."""
        try:
            # Python writes one byte for each signal: its number
            return [signal.Signals(number) for number in os.read(self.fd, 4096)]
        except BlockingIOError:
            return []

    def put_back(self, numbers: Sequence[signal.Signals]) -> None:
        """Put signals back into the pipe, so that the next `read` returns them again."""
        for number in numbers:
            self._put(number)

    def stop_is_requested(self) -> bool:
        """Return True if a signal asks the job to end. The signal stays in the pipe for the caller of `read`."""
        numbers = self.read()
        self.put_back(numbers)
        return any(number in JOB_STOP_SIGNALS for number in numbers)

    def __enter__(self) -> SignalPipe:
        self._main_thread = threading.get_ident()
        # set the pipe before the handlers: otherwise a signal in between would be lost
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _HANDLED_SIGNALS:
            # if SIGCHLD were ignored, the kernel would discard the exit codes of children
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _nothing)
        if self._control_path is not None:
            self._control = ControlChannel(self._control_path, self._request)
        return self

    @contextlib.contextmanager
    def raising(self) -> Generator[None]:
        """Raise StopRequested within the block when a signal asks the job to end.

        This interrupts code that waits. The signal is also written to the pipe.
        """
        taken = [number for number in JOB_STOP_SIGNALS if number in self._before]

        def raise_once(number: int, frame: FrameType | None) -> None:
            # a second signal must not interrupt the cleanup after the first
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
        """Handle a request of another process like a signal. Called in a thread."""
        if number in self._before:
            # send a real signal: it also interrupts code within `raising`
            signal.pthread_kill(self._main_thread, number)
        else:
            self._put(number)

    def _put(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # the pipe has been closed
            os.write(self._write_fd, bytes([number]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._control is not None:
            self._control.close()
        late = self._late if error is None else None
        if late is not None:
            late.take_over()
        for number, handler in self._before.items():
            if late is not None and number in JOB_STOP_SIGNALS:
                continue
            # Do not restore a handler that would do harm. With the default handler of SIGCHLD, Python complains about a
            # child that ends at this moment. After a stop request, a second signal would kill this process during its
            # cleanup.
            is_stopping = isinstance(error, StopRequested)
            is_harmful = (is_stopping and number != signal.SIGINT) or (
                handler == signal.SIG_DFL and (number == signal.SIGCHLD or is_stopping)
            )
            if not is_harmful:
                # a handler that was not set from Python is None
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)
        self.close()

    def close(self) -> None:
        """Close the pipe. Call it only for a pipe that is never entered, and only gets signals from `put_back`."""
        os.close(self.fd)
        os.close(self._write_fd)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing, since Python has already written the number to the pipe."""


class ControlChannel:
    """Accepts requests until it is closed. If no socket can be created, it does nothing.

    Args:
        put: called in a thread with the signal that a request stands for.
    """

    def __init__(self, path: Path, put: Callable[[signal.Signals], None]) -> None:
        self._path, self._put = path, put
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._over = threading.Event()
        try:
            # remove the socket of an earlier launcher: the caller holds the run's lock, so that launcher is gone
            path.unlink(missing_ok=True)
            with address_of(path) as address:
                self._listener.bind(address)
            # only the user who runs the job may stop it; nobody can connect before `listen`
            path.chmod(0o600)
            self._listener.listen()
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
            except OSError:  # the listener is closed, or the process has too many open files
                _close_abandoned()
                self._over.wait(_ACCEPT_RETRY_S)
                continue
            # clients are served one after the other, so a silent client must not block the others
            connection.settimeout(_REQUEST_TIMEOUT_S)
            try:
                refused = self._take(read_line(connection))
                connection.sendall(json.dumps({"refused": refused} if refused else {}).encode() + b"\n")
                _close_abandoned()
                _answered.append(connection)
            except OSError:  # the client is gone or has sent nothing
                connection.close()

    def _take(self, line: bytes) -> str:
        """Carry out a request. Return why it is refused, or an empty string."""
        try:
            asked = json.loads(line)
            version, request = asked["version"], asked["request"]
        except (ValueError, KeyError, TypeError):
            return "expected a line of JSON with 'version' and 'request'"
        if version != VERSION:
            return f"the run's launcher uses version {VERSION} of the protocol, not {version}"
        if request == "stop":
            self._put(signal.SIGTERM)
        elif request == "stop-now":
            self._put(signal.SIGINT)
            threading.Event().wait(_CTRL_C_INTERVAL_S)
            self._put(signal.SIGINT)
        elif request == "stacks":
            self._put(DUMP_SIGNAL)
        else:
            return f"got {request!r}; expected one of {', '.join(REQUESTS)}"
        return ""


def _close_abandoned() -> None:
    """Close answered connections whose clients are gone, to free their descriptors."""
    poller = select.poll()
    for connection in _answered:
        # with no event requested, `poll` still reports hang-ups and errors
        poller.register(connection, 0)
    gone = {fd for fd, _ in poller.poll(0)}
    for connection in [each for each in _answered if each.fileno() in gone]:
        _answered.remove(connection)
        connection.close()
