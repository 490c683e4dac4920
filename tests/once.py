"""Expensive values that are the same in all processes of a session: the first process that needs one makes it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.run_dir import write_atomically


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Return the result of `make`, which is stored as JSON; `make` gets an empty folder.

    pytest-xdist distributes the tests of a module over its processes, each of which makes the module's fixtures itself.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once" / name
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "made.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait; of one that is killed the system takes it back
        if not made.exists():
            write_atomically(made, json.dumps(make(factory.mktemp("once"))))
    return json.loads(made.read_text())
