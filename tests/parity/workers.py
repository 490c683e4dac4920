"""Starts the worker processes of a parity test, each with its TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.warm import DEADLINE_S, run_modules


def run_workers(
    folder: Path,
    module: str,
    arguments: Sequence[str],
    number: int = 2,
    deadline_s: float = DEADLINE_S,
    backend: str = "tensorflow",
    **environment: str,
) -> None:
    """`python -m MODULE ARGUMENTS` in so many processes, until all have ended well.

    Args:
        folder: for their logs.
        environment: what nothing reads while it is imported.
    """
    import portpicker

    addresses = [f"127.0.0.1:{portpicker.pick_unused_port()}" for _ in range(number)]
    tasks = [{"type": "worker", "index": index} for index in range(number)]
    configs = [json.dumps({"cluster": {"worker": addresses}, "task": task}) for task in tasks]
    own = [{"TF_CONFIG": config, **environment} for config in configs]
    run_modules(folder, module, arguments, own, backend=backend, deadline_s=deadline_s)
