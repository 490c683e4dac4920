"""Times of steps, which programs report for each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

MEASURE_EVERY = 7
"""Number of steps from one measured wait for input to the next, where batches are read while the devices compute.

A measured step takes longer. The number is odd, because every second step may wait if batches come in pairs.
"""


@dataclass(frozen=True)
class StepTimes:
    """Step and input-wait times of one call in this process.

    Attributes:
        seconds: duration of each step, from the end of the previous one; includes the wait for its input.
        input_s: total seconds of waiting for batches that were not ready.
        examples: this process's share of the examples of these steps.
        peers_s: total seconds from the moment at which this process's gradients were ready until they were summed with
            those of the other processes; None if this is not measured.
    """

    seconds: tuple[float, ...] = ()
    input_s: float = 0.0
    examples: float = 0.0
    peers_s: float | None = None

    @classmethod
    def of(cls, rows: np.ndarray, peers_s: float | None = None) -> Self:
        """Return the times from rows of a float64 array.

        The result is empty if all times are 0, as without a clock; see `graph_clock.now`.

        Args:
            rows: shape [steps, 3]: seconds of waiting, seconds of the step, examples.
            peers_s: see the class.
        """
        waited, seconds, examples = rows.T
        if not seconds.any():
            return cls()
        return cls(tuple(seconds.tolist()), float(waited.sum()), float(examples.sum()), peers_s)

    def __add__(self, other: StepTimes) -> StepTimes:
        known = [each.peers_s for each in (self, other) if each.peers_s is not None]
        return StepTimes(
            self.seconds + other.seconds, self.input_s + other.input_s, self.examples + other.examples,
            sum(known) if known else None,
        )  # fmt: skip
