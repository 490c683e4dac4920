"""`python -P -m distlaunch.agent.warm_process FD MODULE [ARGUMENT ...] PADDING`: imports MODULE, and forks tasks.

This module uses one thread, no signal handlers and little beyond the standard library, since tasks inherit all of it.
MODULE's `main(arguments)` does the imports, and returns why the process must not be forked, or an empty string. A
request on the socket FD is JSON with four descriptors (standard output, standard error, the lifeline and the gate).

A task must be a child of the process that has requested it: the requesting process reaps the task and gets its exit
code from the kernel. So the task is forked by an intermediate process that ends at once, while the requesting process
is the subreaper of its descendants (prctl(2), PR_SET_CHILD_SUBREAPER). A task begins only when it reads a byte from the
gate. If the requesting process never learns the task's process ID, it closes the gate and the task ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

from distlaunch.base.socket_messages import receive_message, send_message

_NUM_FDS = 4
PADDING = " " * 3000
"""The last argument. A forked task overwrites it with its own command line, for `ps`."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Import the module, and fork tasks on request."""
    number, module, *arguments, _ = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # forked tasks do not inherit this
    connection = socket.socket(fileno=int(number))
    # imports create a million objects that stay; garbage collections that search them again and again would take a
    # fifth of the time. The documentation of `gc.freeze` also advises against collections before a fork
    gc.disable()
    try:
        unfit = importlib.import_module(module).main(arguments)
    except Exception as error:  # tasks are then started as fresh processes, which report the error to the user
        unfit = f"{type(error).__name__}: {error}"
    _answer(connection, {"unfit": unfit})
    if not unfit:
        serve(connection)


def serve(connection: socket.socket) -> None:
    """Fork tasks until the other end of the socket is closed, and exit. A forked process runs its task and returns."""
    # remember the versions of the files that were imported
    stamps = _stamps()
    # garbage collection in a task must not write to, and so copy, the memory pages of the imports
    gc.freeze()
    while (request := _receive(connection)) is not None:
        request, fds = request
        if _stamps() != stamps:
            _answer(connection, {"unfit": "packages were changed since they were imported"})
            break
        task = _fork()
        if task is None:
            # otherwise the launcher would get no end of file when the warm process ends
            connection.close()
            _become(request, fds)
            return
        # the reader of the task's pipes gets no end of file while this process has them open
        for fd in fds:
            os.close(fd)
        _answer(connection, {"pid": task})
    # a normal exit would take 0.2 s to clean up the imported modules
    os._exit(0)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    send_message(connection, json.dumps(answer).encode())


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request with its descriptors, or None at the end."""
    try:
        data, fds = receive_message(connection, _NUM_FDS)
    except EOFError:
        return None
    return json.loads(data), fds


def _stamps() -> list[tuple[int, int]]:
    """Return values that change when an imported package is reinstalled."""
    files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if "." not in name]
    found: list[tuple[int, int]] = []
    for file in filter(None, files):
        try:
            status = os.stat(file)
            found.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            found.append((0, 0))
    return found


def _fork() -> int | None:
    """Fork; return the task's process ID, None in the task, or 0 if the fork failed."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        task = -1
        try:
            task = os.fork()
        finally:
            # the intermediate process must always end here, also if the fork failed (-1)
            if task:
                os._exit(0)
        os.close(read)
        os.setsid()  # create the group before reporting the ID, since the launcher may then kill the group
        os.write(write, str(os.getpid()).encode())
        os.close(write)
        return None
    os.close(write)
    os.waitpid(between, 0)  # after this, the task is a child of the requesting process
    # a process ID has at most 7 digits; the answer is empty if the fork failed
    number = os.read(read, 32)
    os.close(read)
    return int(number or b"0")


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Give this forked process the state of a fresh process, and run the task in it."""
    stdout, stderr, lifeline, gate = fds
    begin = os.read(gate, 1)
    os.close(gate)
    if not begin:
        os._exit(0)
    gc.enable()
    for fd, place in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdout = sys.__stdout__ = _reopen(sys.stdout)
    sys.stderr = sys.__stderr__ = _reopen(sys.stderr)
    # change `os.environ` itself, since C code reads the environment of the process
    os.environ.clear()
    os.environ.update(request["env"], **{request["lifeline"]: str(lifeline)})
    os.chdir(request["cwd"])
    import tempfile  # imported here, since agents import this module only for its constants

    # let `tempfile` look for its folder again, since the task may have another TMPDIR
    tempfile.tempdir = None
    argv = request["argv"]
    _set_command_line(argv)
    sys.orig_argv[:] = argv
    # `runpy` replaces the first element by the module's file
    sys.argv = argv[3:]
    runpy.run_module(argv[3], run_name="__main__", alter_sys=True)


def _reopen(stream: Any) -> io.TextIOWrapper:
    """Reopen a standard stream, whose descriptor may have been a seekable file and is a pipe now."""
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    raw.name = stream.name  # pyright: ignore[reportAttributeAccessIssue]
    binary = raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        binary,  # pyright: ignore[reportArgumentType]
        stream.encoding,
        stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _set_command_line(argv: list[str]) -> None:
    """Overwrite the command line of this process within its length, like setproctitle."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
        room = end - begin - 1
        text = "\0".join(argv).encode(errors="surrogateescape")[:room]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)
    except (OSError, ValueError, IndexError):  # the command line is only informative
        return


if __name__ == "__main__":
    main()
