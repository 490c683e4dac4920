"""A small process beside the launcher: when the launcher has ended, it kills every process group that is left.

Started as a script with `python -I -S`, so it imports the standard library only. Standard input carries `+PGID` and
`-PGID` lines; its end of file means that the launcher has ended, in whatever way.
"""

import os
import signal
import sys


def main() -> None:
    """Watch the launcher until it has ended."""
    # what ends the launcher must not end what is to outlast it
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
        # the group has ended, or its number belongs to another user by now
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
