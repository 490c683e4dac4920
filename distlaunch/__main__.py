"""`python -m distlaunch` is the `distlaunch` command."""

import sys

if not sys.flags.safe_path:
    # this entry is the current directory: a `random.py` there would hide Python's, and the command needs no user code
    del sys.path[0]

from distlaunch.cli.main import main

if __name__ == "__main__":
    main()
