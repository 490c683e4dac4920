"""A small process that kills the remaining process groups of a launcher after the launcher has ended.

It is started as a script with `python -I -S`, so it imports only the standard library. It reads lines `+PGID` and
`-PGID` from standard input. The end of file means that the launcher has ended.
"""

import os
import signal
import sys


def main() -> None:
    """Wait until the launcher has ended, and kill the process groups of its remaining tasks."""
    # signals that end the launcher must not end the guard
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        # the group has ended, or its number now belongs to another user
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
