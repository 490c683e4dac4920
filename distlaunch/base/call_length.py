"""The number of steps in a call of `steps_per_call: auto`, for training and for the search of `tune`."""

from __future__ import annotations

TARGET_S = 0.5
"""Duration of a call in seconds. A stop request is noticed only between two calls."""
LONGEST = 64
"""Most steps of a call."""
BLOCK_STEPS = 8
"""Number of steps that DTensor compiles together for a small model."""


def steps_in_call(step_s: float, *, target_s: float = TARGET_S) -> int:
    """Return the number of steps in a call.

    Args:
        step_s: the duration of a step in seconds.
        target_s: the duration of the call in seconds.
    """
    return max(1, min(LONGEST, int(target_s / max(step_s, 1e-6))))
