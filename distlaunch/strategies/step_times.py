"""The time that steps took, as programs report it for each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class StepTimes:
    """How the time of a call's steps went in this process.

    Attributes:
        seconds: of each step, from the end of the one before; the wait for its input included.
        input_s: of all together, the time in which there was nothing to compute, because the next batch was not there.
        examples: this process's share of the examples of these steps.
    """

    seconds: tuple[float, ...] = ()
    input_s: float = 0.0
    examples: float = 0.0

    @classmethod
    def of(cls, rows: np.ndarray) -> Self:
        """Of float64 [steps, 3]: seconds of waiting, seconds of the step, examples.

        Nothing if no step took any time, as where there is no clock; see `graph_clock.now`.
        """
        waited, seconds, examples = rows.T
        if not seconds.any():
            return cls()
        return cls(tuple(seconds.tolist()), float(waited.sum()), float(examples.sum()))

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(self.seconds + other.seconds, self.input_s + other.input_s, self.examples + other.examples)
