"""The check of the batch that only a task can make: on the devices that it really has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.config.read.load import load_mapping

config = load_mapping({
    "model": {"function": "distlaunch.workloads.regression:linear"},
    "data": {"function": "distlaunch.workloads.regression:three_rows", "global_batch": 7},
    "strategy": {"kind": "mirrored"},
}).config
from distlaunch.training.session import Session

try:
    Session(config, RunDir("run"), Task("worker", 0), lambda event: None, lambda: False)
except ConfigError as error:
    print(error)
"""


def test_replicas_that_nobody_could_count_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout == "data.global_batch: got 7, which 2 replicas cannot share equally; use 6 or 8\n", done.stderr
