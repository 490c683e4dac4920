"""`python -m distlaunch` is the `distlaunch` command."""

import sys

if not sys.flags.safe_path:
    # the current directory: a `random.py` there would shadow Python's, and the command imports no code of the user
    del sys.path[0]

from distlaunch.cli.main import main

if __name__ == "__main__":
    main()
