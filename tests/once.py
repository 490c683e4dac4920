"""What is dear, and the same for all of a session's processes, is made by the first of them that needs it."""

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
    """What `make` gives, which JSON holds; it gets an empty folder.

    pytest-xdist deals the tests of a module to all of its processes, and each has the module's fixtures by itself.
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
