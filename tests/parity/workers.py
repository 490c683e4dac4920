"""Starts the worker processes of a parity test, each with its TF_CONFIG."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

DEADLINE_S = 900


def run_workers(
    folder: Path,
    module: str,
    arguments: Sequence[str],
    number: int = 2,
    deadline_s: float = DEADLINE_S,
    **environment: str,
) -> None:
    """`python -m MODULE ARGUMENTS` in so many processes, until all have ended well.

    Args:
        folder: for their logs.
    """
    import portpicker

    addresses = [f"127.0.0.1:{portpicker.pick_unused_port()}" for _ in range(number)]
    processes = []
    for index in range(number):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        own = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
        command = [sys.executable, "-m", module, *arguments]
        with (folder / f"worker-{index}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(deadline_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"worker-{index}.log").read_text()[-3000:] for index in range(number))
    assert codes == [0] * number, logs
