"""`python -m distlaunch` is the `distlaunch` command."""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():
    # a `random.py` of the user's there would be Python's; the command imports nothing of the user's
    del sys.path[0]

from distlaunch.cli.main import main

if __name__ == "__main__":
    main()
