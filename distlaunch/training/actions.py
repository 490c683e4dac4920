"""When actions of the loop are due, separate from the actions themselves."""

from __future__ import annotations

from dataclasses import dataclass

from distlaunch.strategies.protocol import CallResult


@dataclass(frozen=True)
class Every:
    """Due at multiples of `steps` and after every `epochs`-th epoch; None: never."""

    steps: int | None
    epochs: int | None

    def steps_until_due(self, step: int) -> int | None:
        """How many steps may run from `step` before this is due again; None: no limit."""
        return None if self.steps is None else self.steps - step % self.steps

    def due_at_step(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0

    def due_after_epoch(self, epoch: int) -> bool:
        """`epoch` counts from 0."""
        return self.epochs is not None and (epoch + 1) % self.epochs == 0


class CallLength:
    """How many steps to run in one graph call.

    Args:
        wanted: a number, or "auto": as many as take about half a second, measured by the chief.
        each_batch: a callback watches every batch, so `auto` means 1.
    """

    TARGET_S = 0.5  # a wish to stop is heard between two calls, so about that soon
    LONGEST = 64

    def __init__(self, wanted: int | str, *, each_batch: bool) -> None:
        self._auto = wanted == "auto" and not each_batch
        self._length = 1 if self._auto or wanted == "auto" else int(wanted)
        self._calls = 0

    @property
    def length(self) -> int:
        return self._length

    def proposal(self, result: CallResult, seconds: float) -> int:
        """The length that this task would choose after a call; the first call compiles and shows nothing."""
        self._calls += 1
        if not self._auto or self._calls == 1 or result.steps == 0:
            return self._length
        fitting = int(self.TARGET_S * result.steps / max(seconds, 1e-6))
        return max(1, min(fitting, self.LONGEST, 4 * self._length))

    def accept(self, length: int) -> None:
        """Takes over the chief's choice, which reaches all tasks with the votes."""
        if self._auto and length > 0:
            self._length = length
