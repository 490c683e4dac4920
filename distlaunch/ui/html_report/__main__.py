"""Writes the page of a run: `python -m distlaunch.ui.html_report RUN [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from distlaunch.base.run_dir import RunDir
from distlaunch.ui.html_report.page import write_page


def main() -> None:
    run = RunDir(sys.argv[1])
    write_page(run, Path(sys.argv[2]) if len(sys.argv) > 2 else run.report)


if __name__ == "__main__":
    main()
