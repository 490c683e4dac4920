"""`python -m distlaunch.tasks.list_checkpoint FOLDER WHICH ANSWER`: lists the contents of a checkpoint.

Used by `distlaunch report --checkpoint`; needs no framework. WHICH is a step, `best` or `newest`. The file ANSWER gets
one JSON object: `path`, `step`, `epoch` and `variables`, or `message`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from distlaunch.base import strict_json
from distlaunch.base.errors import CheckpointError
from distlaunch.base.run_dir import BEST
from distlaunch.checkpoints.store import CheckpointStore


def main() -> None:
    folder, which, answer = sys.argv[1:]
    try:
        result = _list_checkpoint(CheckpointStore(Path(folder)), which)
    except CheckpointError as error:
        result = {"message": str(error)}
    Path(answer).write_text(strict_json.dumps(result), encoding="utf-8")


def _list_checkpoint(store: CheckpointStore, which: str) -> dict[str, Any]:
    if which == "newest":
        saved = store.newest_good()
        if saved is None:
            raise CheckpointError(f"{store.directory}: there is no checkpoint")
    else:
        saved = store.load(BEST if which == BEST else int(which))
    variables = [
        {
            "name": name,
            "shape": list(value.shape),
            "dtype": value.dtype.name,
            "bytes": value.nbytes,
            "norm": _norm(value),
        }
        for name, value in saved.state.items()
    ]
    progress = saved.progress
    return {"path": str(saved.path), "step": progress.step, "epoch": progress.epoch, "variables": variables}


def _norm(value: np.ndarray) -> float | None:
    """Return the square root of the sum of squares, or None for values that are not numbers."""
    try:
        return float(np.linalg.norm(np.abs(value).astype(np.float64).ravel()))
    except (TypeError, ValueError):
        return None


if __name__ == "__main__":
    main()
