"""Lists the variables of a checkpoint in a helper process, since the launcher does not import NumPy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from distlaunch.base.errors import CheckpointError, UsageError
from distlaunch.base.helper_process import ANSWER, run_helper
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.run_dir import BEST, BestName, RunDir
from distlaunch.plan.train import REMOVED_ENV
from distlaunch.runs.paths import display_path

Listing = dict[str, Any]
"""`path`, `step`, `epoch`, and `variables` with `name`, `shape`, `dtype`, `bytes`, `norm` (None if not numeric)."""


def check_checkpoint_exists(run: RunDir, checkpoint: int | BestName) -> None:
    """Raise UsageError if the run has no such checkpoint."""
    if checkpoint == BEST:
        if not run.has_best():
            hint = "set `checkpoint.best` before training to keep one"
            raise UsageError(
                f"--checkpoint: {display_path(run.path)} has no best checkpoint; {hint}; {_available(run)}"
            )
    elif checkpoint not in run.checkpoint_steps():
        raise UsageError(
            f"--checkpoint: {display_path(run.path)} has no checkpoint of step {checkpoint}; {_available(run)}"
        )


def _available(run: RunDir) -> str:
    best = run.best_checkpoint()
    steps = [*map(str, run.checkpoint_steps()), *([f"best (step {best[0]})"] if best is not None else [])]
    return f"available: {', '.join(steps) or 'none'}"


def list_checkpoint(run: RunDir, checkpoint: int | BestName | None, environ: Mapping[str, str]) -> Listing:
    """Return the variables of a checkpoint in their order in the file.

    Args:
        checkpoint: the step or `best`; None for the newest intact checkpoint.

    Raises:
        UsageError: there is no such checkpoint.
        CheckpointError: the checkpoint is damaged, or the run has none at all.
    """
    if checkpoint is not None:
        check_checkpoint_exists(run, checkpoint)
    which = "newest" if checkpoint is None else str(checkpoint)
    argv = [sys.executable, *SAFE_MODULE, "distlaunch.tasks.list_checkpoint", str(run.checkpoints), which, ANSWER]
    answer = run_helper(argv, {name: value for name, value in environ.items() if name not in REMOVED_ENV})
    if answer.value is None:
        raise CheckpointError(f"the process that reads the checkpoint {answer.how_it_ended}{answer.last_lines(5)}")
    if "message" in answer.value:
        raise CheckpointError(answer.value["message"])
    return answer.value
