"""The `distlaunch` command with fake_worker.py in place of the worker."""

import sys
from pathlib import Path

from distlaunch.cli.main import main
from distlaunch.launch import plan

real_argv = plan.worker_argv


def fake_argv(*arguments, **options):  # type: ignore[no-untyped-def]
    return (sys.executable, str(Path(__file__).with_name("fake_worker.py")), *real_argv(*arguments, **options)[3:])


plan.worker_argv = fake_argv
main()
