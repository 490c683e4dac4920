"""Processes that only watch a run give way to training, whatever Linux schedules by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os
from pathlib import Path
from distlaunch.base.priority import yield_to_training
yield_to_training()
print(os.nice(0))
print(Path("/proc/self/autogroup").read_text())
"""


def priorities(*, own_session: bool) -> tuple[int, str]:
    """Return the nice value of a process and what Linux says of its session."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], start_new_session=own_session, stdout=subprocess.PIPE, text=True, check=True
    )
    nice, autogroup = done.stdout.split("\n", 1)
    return int(nice), autogroup.strip()


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not schedule by session")
def test_the_session_of_a_watcher_has_the_lowest_priority() -> None:
    nice, autogroup = priorities(own_session=True)
    assert nice == 19
    assert autogroup.endswith(" nice 19")


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not schedule by session")
def test_the_session_of_another_process_stays_as_it_is() -> None:
    # Empty text: the kernel's first session, in which the processes of a container may run, has no nice value.
    assert priorities(own_session=False) == (19, AUTOGROUP.read_text().strip())
