"""`data.processes`: reads examples of a Python object in separate processes, which share no interpreter lock.

A new process loads the object and the modules that the object needs. The new process then forks the readers, which
share its memory. A task itself must not be forked, because TensorFlow has threads in it.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from distlaunch.base.errors import ConfigError, DataError, Problem
from distlaunch.base.events import Notice
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.user_modules import added_folders
from distlaunch.data.examples.pending_events import add_event
from distlaunch.data.examples.reader_messages import Failed, Fork, ReadRequest, Setup, Status, receive, send
from distlaunch.data.function_references import imported_files

_KEY = ("data", "processes")
_MAX_READS = 2
"""Number of times that an example is read if its reader process dies each time; the first death may be an accident."""
_READER_ENVIRONMENT = {
    **dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # only the task uses devices
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
}

pools: dict[int, tuple[Any, ReaderPool]] = {}


def reader_pool(items: Any, number: int, seed: int) -> ReaderPool:
    """Return the pool for this object, which lives until the end of this process.

    Raises:
        ConfigError: the object cannot be sent to other processes.
    """
    if id(items) not in pools:
        pools[id(items)] = items, ReaderPool(items, number, seed)
    return pools[id(items)][1]


class ReaderPool:
    """Processes that read examples. They end with this process, or with the pool.

    Args:
        number: number of readers.
        seed: the run's seed.
    """

    def __init__(self, items: Any, number: int, seed: int) -> None:
        setup = Setup(list(sys.path), list(sys.argv), added_folders(), imported_files(), _pickle(items), seed)
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, *SAFE_MODULE, "distlaunch.tasks.readers", str(theirs.fileno())]
            env = {**os.environ, **_READER_ENVIRONMENT}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, pass_fds=[theirs.fileno()])
        # sent now, so that the process imports modules while the model is built
        send(self._control, setup)
        self._number, self._ready, self._lock = number, False, threading.Lock()
        self._idle: queue.SimpleQueue[_ReaderProcess] = queue.SimpleQueue()

    def open(self) -> None:
        """Start the readers and wait until they are ready.

        Raises:
            ConfigError: the object cannot be used in another process.
        """
        with self._lock:
            if self._ready:
                return
            try:
                answer, _ = receive(self._control)
            except EOFError:
                answer = Failed(f"its process ended by {_describe_exit(self._process.wait())}")
            if isinstance(answer, Failed):
                message = f"the data function's object cannot be used in another process: {answer.reason}"
                raise ConfigError(Problem(_KEY, f"{message}; fix this, or remove `processes`"))
            for _ in range(self._number):
                self._idle.put(self._fork())
            self._ready = True

    def read(self, number_of_pass: int, index: int) -> Any:
        """Return an example with arrays as leaves.

        Raises:
            DataError: reading the example has failed, or two reader processes have died.
        """
        reader = self._idle.get()
        try:
            for left in reversed(range(_MAX_READS)):
                try:
                    answer = reader.ask(ReadRequest(number_of_pass, index))
                except EOFError:
                    ended, reader = self._replace(reader)
                    if not left:
                        raise DataError(f"the process that reads it ended by {ended}, {_MAX_READS} times") from None
                    message = f"data.processes: a process ended by {ended} while it read example {index:,}"
                    add_event(Notice(level="warning", message=f"{message}; another process reads it again"))
                    continue
                if isinstance(answer, Failed):
                    raise DataError(answer.reason)
                return answer
        finally:
            self._idle.put(reader)

    def close(self) -> None:
        """End all reader processes."""
        self._control.close()
        self._process.wait()

    def _replace(self, reader: _ReaderProcess) -> tuple[str, _ReaderProcess]:
        """Return how a reader process ended, and a new one that replaces it."""
        with self._lock:
            try:
                send(self._control, Status(reader.pid))
                return _describe_exit(receive(self._control)[0]), self._fork()
            except (OSError, EOFError):
                ended = _describe_exit(self._process.wait())
                raise DataError(f"the process that starts the reader processes has ended: {ended}") from None

    def _fork(self) -> _ReaderProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            send(self._control, Fork(), theirs.fileno())
        return _ReaderProcess(ours, receive(self._control)[0])


class _ReaderProcess:
    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid = connection, pid

    def ask(self, request: ReadRequest) -> Any:
        """Send a request and return the answer. Raise EOFError if the process has ended."""
        try:
            send(self._connection, request)
        except OSError:
            raise EOFError from None
        return receive(self._connection)[0]


def _pickle(items: Any) -> bytes:
    try:
        return pickle.dumps(items, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the user's __reduce__ may raise any error
        message = f"{type(items).__name__} cannot be sent to other processes: {type(error).__name__}: {error}"
        hint = "open files when the first item is read, define functions at the top level, or remove `processes`"
        raise ConfigError(Problem(_KEY, f"{message}; {hint}")) from None


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
