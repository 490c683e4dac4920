"""`python -m tests.run_file FILE ARGUMENTS`: a Python file as a program, for processes that are forked as modules."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
