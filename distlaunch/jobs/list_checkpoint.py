"""The contents of a checkpoint, read by a helper process: this process does not import NumPy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from distlaunch.base.errors import CheckpointError, UsageError
from distlaunch.base.helper_process import ANSWER, run_helper
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.run_dir import BEST, BestName, RunDir
from distlaunch.plan.train import REMOVED_ENV
from distlaunch.runs.paths import shown

Listing = dict[str, Any]
"""`path`, `step`, `epoch`, and `variables`: `name`, `shape`, `dtype`, `bytes`, `norm` (None for what is no number)."""


def check_kept(run: RunDir, checkpoint: int | BestName) -> None:
    """Raise UsageError if the run has no such checkpoint."""
    if checkpoint == BEST:
        if not run.has_best():
            hint = "`checkpoint.best` keeps one while a run trains"
            raise UsageError(f"--checkpoint: {shown(run.path)} has no best one; {hint}; {_there(run)}")
    elif checkpoint not in run.checkpoint_steps():
        raise UsageError(f"--checkpoint: {shown(run.path)} has none of step {checkpoint}; {_there(run)}")


def _there(run: RunDir) -> str:
    best = run.best_checkpoint()
    steps = [*map(str, run.checkpoint_steps()), *([f"best (step {best[0]})"] if best is not None else [])]
    return f"those there are: {', '.join(steps) or 'none'}"


def list_checkpoint(run: RunDir, checkpoint: int | BestName | None, environ: Mapping[str, str]) -> Listing:
    """Return the variables of a checkpoint in their order in the file.

    Args:
        checkpoint: its step; None: the newest good one.

    Raises:
        UsageError: there is no such checkpoint.
        CheckpointError: it is damaged, or there is none at all.
    """
    if checkpoint is not None:
        check_kept(run, checkpoint)
    which = "newest" if checkpoint is None else str(checkpoint)
    argv = [sys.executable, *SAFE_MODULE, "distlaunch.tasks.list_checkpoint", str(run.checkpoints), which, ANSWER]
    answer = run_helper(argv, {name: value for name, value in environ.items() if name not in REMOVED_ENV})
    if answer.value is None:
        raise CheckpointError(f"the process that reads the checkpoint {answer.how_it_ended}{answer.last_lines(5)}")
    if "message" in answer.value:
        raise CheckpointError(answer.value["message"])
    return answer.value
