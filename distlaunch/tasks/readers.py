"""`python -m distlaunch.tasks.readers FD`: reads examples of a Python object for a task.

Started by `data/examples/reader_pool.py`. This process receives the object and forks; it has one thread, so that the
state of its forks is consistent.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from distlaunch.base.code_origins import user_line
from distlaunch.base.user_modules import add_folder
from distlaunch.data.examples.python_values import as_arrays
from distlaunch.data.examples.reader_messages import Failed, Fork, ReadRequest, Setup, Status, receive, send
from distlaunch.tasks.no_terminal import refuse_input
from distlaunch.tasks.threads import num_threads

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WORD = 0xFFFFFFFF


def main() -> None:
    """Receive the object, and fork a reader on each request; end with the task."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # the task decides when reading ends: after a stop request it may still need rows for an agreed step
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    refuse_input()
    # JAX warns about threads at every fork; this process counts its threads itself
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    try:
        setup, _ = receive(connection)
        threads = num_threads()
        items = _load_items(setup)
        if num_threads() > threads:
            cause = "importing its module starts threads, as TensorFlow's operations do"
            items = Failed(f"{cause}, and a process with threads must not fork")
        send(connection, items if isinstance(items, Failed) else None)
        if not isinstance(items, Failed):
            gc.collect()
            gc.freeze()  # a collection in a reader must not touch, and so copy, shared pages
            _serve(connection, items, setup.seed)
    except (EOFError, BrokenPipeError):  # the task has ended
        return


def _load_items(setup: Setup) -> Any:
    sys.path[:], sys.argv = setup.path, list(setup.argv)
    for folder in setup.folders:
        add_folder(folder)
    sys.meta_path.append(_Files(setup.files))
    try:
        return pickle.loads(setup.items)
    except BaseException as error:
        return Failed(f"{type(error).__name__}: {error}{user_line(error)}")


class _Files(importlib.abc.MetaPathFinder):
    """Finds files that a config names, under the module names by which the task has imported them."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)


def _serve(connection: socket.socket, items: Any, seed: int) -> None:
    while True:
        request, fds = receive(connection)
        if isinstance(request, Status):
            send(connection, os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1]))
            continue
        assert isinstance(request, Fork)
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:  # the parent ended before prctl
                os._exit(1)
            connection.close()  # otherwise the task would not notice the end of the parent
            _read(socket.socket(fileno=fds[0]), items, seed)
            os._exit(0)
        os.close(fds[0])
        send(connection, pid)


def _read(connection: socket.socket, items: Any, seed: int) -> None:
    """Answer requests for examples until the task has ended."""
    try:
        while True:
            request, _ = receive(connection)
            answer = _answer(items, request, seed)
            try:
                send(connection, answer)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                send(connection, Failed(f"its content cannot be sent: {type(error).__name__}: {error}"))
    except (EOFError, BrokenPipeError):
        return


def _answer(items: Any, request: ReadRequest, seed: int) -> Any:
    # the random numbers of an example do not depend on the reading process, and differ between epochs
    random.seed(f"{seed} {request.number_of_pass} {request.index}")
    np.random.seed([seed & _WORD, request.number_of_pass & _WORD, request.index & _WORD])
    try:
        return as_arrays(items[request.index])
    except BaseException as error:  # SystemExit too: a reader that exits would look like a killed one
        return Failed(f"{type(error).__name__}: {error}{user_line(error)}")


if __name__ == "__main__":
    main()
