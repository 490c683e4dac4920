"""`python -m distlaunch.agent.isolate COMMAND ...`: executes the command in a new network namespace.

The command's processes reach only each other, over 127.0.0.1, and no other process reaches them. See namespaces(7) and
user_namespaces(7). Root creates the namespace directly. Other users need a user namespace, if the system allows that.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
_IFF_UP = 1
_REQUEST = struct.Struct("16sh22x")  # struct ifreq: name and flags


def main(command: list[str]) -> None:
    """Replace this process by the command in a new network namespace; exit with 2 if that is not allowed."""
    try:
        _leave_network()
        _raise_loopback()
    except OSError as error:
        hint = "leave out this setting, or run in a container whose ports cannot be reached"
        print(f"error: isolate: you cannot create a network namespace on this system ({error.strerror}); {hint}",
              file=sys.stderr)  # fmt: skip
        sys.exit(2)
    os.execvp(command[0], command)


def _leave_network() -> None:
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        # only this process's user and group can be mapped, the group first; see user_namespaces(7)
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")


def _unshare(flags: int) -> None:
    # `os.unshare` came with Python 3.12
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    """Bring up the loopback interface, which is down in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _REQUEST.pack(b"lo", 0))
        name, flags = _REQUEST.unpack(answer)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _REQUEST.pack(name, flags | _IFF_UP))


if __name__ == "__main__":
    main(sys.argv[1:])
