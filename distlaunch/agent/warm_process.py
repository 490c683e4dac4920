"""`python -P -m distlaunch.agent.warm_process FD MODULE [ARGUMENT ...] PADDING`: imports for tasks, and forks them.

Almost only the standard library, one thread, and no signal handlers: whatever is here, every task inherits. MODULE's
`main(arguments)` imports; it returns why the process must not be forked after that, or an empty text. Requests come as
messages on the socket FD: JSON, with four descriptors (standard output, standard error, the lifeline and the gate).

A task must be a child of whoever asked for it, who reaps it and learns its exit code from the kernel. So it is forked
by a process in between that ends at once, while the asking process is the subreaper of its descendants
(prctl(2), PR_SET_CHILD_SUBREAPER). A task begins only when a byte comes through the gate: if the asking process never
learns its number, the gate is closed and the task ends.
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
"""The last argument. Its place takes the command line of a task, which `ps` shows."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Import, and serve."""
    number, module, *arguments, _ = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # cleared in what is forked
    connection = socket.socket(fileno=int(number))
    try:
        unfit = importlib.import_module(module).main(arguments)
    except Exception as error:  # a task that is started without this process reports it to the user
        unfit = f"{type(error).__name__}: {error}"
    _answer(connection, {"unfit": unfit})
    if not unfit:
        serve(connection)


def serve(connection: socket.socket) -> None:
    """Fork tasks until the other end of the socket is closed, and exit. In a forked task, run it and return."""
    # what is there now is what was imported
    stamps = _stamps()
    # what is here stays for good; a collection in a task must not touch, and so copy, its pages
    gc.collect()
    gc.freeze()
    while (request := _receive(connection)) is not None:
        request, fds = request
        if _stamps() != stamps:
            _answer(connection, {"unfit": "packages were changed since they were imported"})
            break
        task = _fork()
        if task is None:
            # else the launcher would see no end of file when this process ends
            connection.close()
            _become(request, fds)
            return
        # the task's pipes must have no other writer, or their end of file never comes
        for fd in fds:
            os.close(fd)
        _answer(connection, {"pid": task})
    # Python's own end takes apart what was imported: 0.2 s, which nobody needs
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
    """Fork; return the task's process id, None in the task, or 0 if that failed."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        task = -1
        try:
            task = os.fork()
        finally:
            # also if the fork failed (-1): the one in between must never go on
            if task:
                os._exit(0)
        os.close(read)
        os.setsid()  # before its number is known: whoever knows it may kill the group
        os.write(write, str(os.getpid()).encode())
        os.close(write)
        return None
    os.close(write)
    os.waitpid(between, 0)  # from here on the task is the asking process's child
    # a process number has at most 7 digits; nothing comes if the fork failed
    number = os.read(read, 32)
    os.close(read)
    return int(number or b"0")


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Give this process the state of a fresh one, and run the task in it."""
    stdout, stderr, lifeline, gate = fds
    begin = os.read(gate, 1)
    os.close(gate)
    if not begin:
        os._exit(0)
    for fd, place in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdout = sys.__stdout__ = _opened_anew(sys.stdout)
    sys.stderr = sys.__stderr__ = _opened_anew(sys.stderr)
    # `os.environ` and not a new dict: C code reads the environment of the process
    os.environ.clear()
    os.environ.update(request["env"], **{request["lifeline"]: str(lifeline)})
    os.chdir(request["cwd"])
    import tempfile  # here: agents, which import this module for its constants, do without

    # found anew: it follows TMPDIR, which may be another one in the task
    tempfile.tempdir = None
    argv = request["argv"]
    _show_as(argv)
    sys.orig_argv[:] = argv
    # `runpy` puts the module's file in the first place
    sys.argv = argv[3:]
    runpy.run_module(argv[3], run_name="__main__", alter_sys=True)


def _opened_anew(stream: Any) -> io.TextIOWrapper:
    """Reopen a standard stream for its descriptor, which may have been a file and now be a pipe without seek."""
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


def _show_as(argv: list[str]) -> None:
    """Overwrite the command line of this process, as setproctitle does, within its length."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
        room = end - begin - 1
        text = "\0".join(argv).encode(errors="surrogateescape")[:room]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)
    except (OSError, ValueError, IndexError):  # it is for people only
        return


if __name__ == "__main__":
    main()
