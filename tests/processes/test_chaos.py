"""scripts/chaos.py: a few of its faults; it is made for hundreds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from supervised import REPOSITORY


@pytest.mark.slow
def test_a_few_faults() -> None:
    """Each one is another: an exception, a full disk, a kill."""
    script = str(Path(REPOSITORY) / "scripts" / "chaos.py")
    words = ["--faults", "3", "--strategies", "one_device", "--kinds", "kill,exception,full_disk"]
    told = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=900)
    assert told.returncode == 0, told.stdout + told.stderr
    assert [line.split()[0] for line in told.stdout.splitlines()[:3]] == ["ok"] * 3
    assert all(f"\n{fault} " in told.stdout for fault in ("kill", "exception", "full_disk"))
