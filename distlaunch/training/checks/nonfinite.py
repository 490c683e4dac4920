"""Reports values that are not finite: the loss of a step, a weight to be saved, or a metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from distlaunch.base.errors import NonFiniteError
from distlaunch.base.events import Event, Notice
from distlaunch.checkpoints.meta import Progress
from distlaunch.strategies.protocol import CallResult, Logs

_HINT = "a smaller learning rate, or clipped gradients, may help; `train.on_nonfinite: warn` continues anyway"

_FIRST = (
    "the initial weights give this on the first batch; look for NaN in the data, for numbers outside the table of an "
    "Embedding, which are NaN on JAX, and for divisions by 0 and logarithms of 0 in the model or the loss"
)

_DIVERGED_BEFORE = (
    "this is the first step after the checkpoint, so training had already diverged when it was saved; delete the "
    "newest checkpoint to resume from an older one, or start a new run"
)


class NonFinite:
    """Raises an error for a value that is not finite, or warns once for each kind of value.

    Args:
        policy: the setting `train.on_nonfinite`.
    """

    def __init__(self, policy: Literal["fail", "warn"], emit: Callable[[Event], None]) -> None:
        self._policy, self._emit = policy, emit
        self._warned: set[str] = set()

    def step(self, result: CallResult, before: Progress, *, restored_step: int = 0) -> None:
        """Handle a step whose loss, or a weight after it, is not finite.

        Args:
            before: progress before the call.
            restored_step: step of the checkpoint that this attempt began with; 0 if none.

        Raises:
            NonFiniteError: the policy is to fail.
        """
        assert result.nonfinite is not None
        step = before.step + result.nonfinite
        found = [f"{name} is {value}" for name, value in _nonfinite(result.logs).items() if "loss" in name]
        what = ", ".join(found) or "weights are not finite"
        hint = _FIRST if found and step == 1 else _HINT
        if restored_step and step == restored_step + 1:
            hint = _DIVERGED_BEFORE
        self._fail_or_warn("loss", f"{what} in step {step:,}, in epoch {before.epoch + 1}", hint)

    def state(self, name: str, step: int) -> None:
        """Handle a value that is about to be saved and is not finite.

        A bad update makes the weights non-finite; the loss is non-finite only in the next step.

        Raises:
            NonFiniteError: the policy is to fail.
        """
        self._fail_or_warn("state", f"'{name}' is not finite after step {step:,}")

    def metrics(self, logs: Logs, epoch: int) -> None:
        """Warn about values at the end of an epoch, counted from 0, that are not finite."""
        for name, value in _nonfinite(logs).items():
            # for the loss, there was a warning with its step already
            if name not in self._warned and not (name == "loss" and "loss" in self._warned):
                self._warned.add(name)
                self._emit(Notice(level="warning", message=f"{name} is {value} in epoch {epoch + 1}"))

    def _fail_or_warn(self, kind: str, message: str, hint: str = _HINT) -> None:
        if self._policy == "fail":
            raise NonFiniteError(f"{message}; {hint}")
        if kind not in self._warned:
            self._warned.add(kind)
            self._emit(Notice(level="warning", message=f"{message}; training continues (train.on_nonfinite: warn)"))


def _nonfinite(logs: Logs) -> Logs:
    return {name: value for name, value in logs.items() if np.size(value) == 1 and not math.isfinite(float(value))}
