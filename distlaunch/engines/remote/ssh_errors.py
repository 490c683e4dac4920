"""Explains why an agent did not start, from the output of ssh and the host's shell."""

from __future__ import annotations

import re

ADDRESS_PROBLEM = "its network cannot be reached from here; check its address, and that it is up"
NO_SERVER = "no ssh server answers"
_CAUSES: tuple[tuple[str, str], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is not the one that ssh knows; if that is right, remove "
     "the old one (`ssh-keygen -R {name}`)"),
    (r"Host key verification failed|No \S+ host key is known", "ssh does not know its host key; "
     "connect once by hand (`ssh {target}`), or add it to known_hosts"),
    (r"Permission denied \(|Too many authentication failures|No more authentication methods",
     "permission denied; ssh must log in without a password (a key, an agent): try `ssh -o BatchMode=yes {target}`"),
    (r"Could not resolve hostname|Name or service not known", "there is no host with this name; check its spelling"),
    (r"Connection refused", f"{NO_SERVER}; check that sshd runs there, and the port"),
    (r"Connection timed out|No route to host|Network is unreachable|Operation timed out", ADDRESS_PROBLEM),
    (r"account is currently not available|This service allows sftp connections only|administratively prohibited",
     "the account may not run commands there"),
)  # fmt: skip
_PYTHON_CAUSES: tuple[tuple[str, str], ...] = (
    (r"unknown option -P|Unknown option: -P",
     "{python} is older than Python 3.11; name a newer Python with python=PATH"),
    (r"No module named '?distlaunch", "distlaunch is not installed for {python}; install it there, or give another "
     "interpreter with python=PATH"),
    (r"(?i)no such file or directory|not found|cannot find|does not exist|permission denied",
     "there is no Python at {python}; install it there, or name another Python with python=PATH"),
)  # fmt: skip
_BUSY = re.compile(r"kex_exchange_identification|ssh_exchange_identification|Connection (?:reset|closed) by")
"""Messages of ssh when a server or jump host accepts no more logins at the moment (`MaxStartups`)."""


def is_busy(stderr: str) -> bool:
    """Return True if the server dropped the connection before the login and may accept it a moment later."""
    return bool(_BUSY.search(stderr)) and "Permission denied" not in stderr


def explain(stderr: str, code: int | None, *, target: str, name: str, python: str) -> str:
    """Explain why the agent did not start, and what to do."""
    for pattern, message in _CAUSES:
        if re.search(pattern, stderr):
            return message.format(target=target, name=name)
    if reason := explain_python(stderr, python):
        return reason
    last = [line for line in stderr.splitlines() if line.strip()][-3:]
    how = "the connection was closed" if code is None or code == 0 else f"ssh ended with exit code {code}"
    return f"{how}: {' / '.join(last)}" if last else f"{how} without a message; try `ssh {target}`"


def explain_python(stderr: str, python: str) -> str:
    """Explain why the interpreter could not start the agent; empty for any other reason."""
    for pattern, message in _PYTHON_CAUSES:
        if re.search(pattern, stderr):
            return message.format(python=python)
    return ""
