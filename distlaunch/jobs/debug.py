"""`train --debug`: trains in this process, so that a debugger can use the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from distlaunch.base.errors import UsageError
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import kept_variables
from distlaunch.config.read.text import is_stream
from distlaunch.plan.train import REMOVED_ENV


def become_debugger(target: str, overrides: Sequence[str], name: str | None, machine: Machine) -> NoReturn:
    """Replace this program by one that trains without graphs. Raise UsageError if there is no such config."""
    if Path(target).is_dir():
        raise UsageError(f"--debug: got the folder {target}; expected a config file, such as {target}/config.yaml")
    if not (is_stream(Path(target)) or Path(target).exists()):
        raise UsageError(f"{target}: there is no such config file")
    words = [word for override in overrides for word in ("--set", override)]
    words += ["--name", name] if name is not None else []
    kept = {key: value for key, value in machine.environ.items() if key not in REMOVED_ENV}
    kept |= kept_variables(machine.hardware)
    # the same process stays in the terminal's foreground group, so input and Ctrl-C reach it
    os.execve(sys.executable, [sys.executable, *SAFE_MODULE, "distlaunch.tasks.debug", *words, "--", target], kept)
