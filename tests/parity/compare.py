"""The rule by which two runs are the same: within ten times the model's own rounding noise, or 1e-5."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE, NOISE_FACTOR = 1e-5, 10.0


def deviations(record: dict[str, Any], reference: dict[str, Any]) -> np.ndarray:
    """Largest relative deviation of any logged value at each step, shape [steps]."""
    assert len(record["steps"]) == len(reference["steps"])
    return np.array([_largest(own, other) for own, other in zip(record["steps"], reference["steps"], strict=True)])


def weight_deviation(record: dict[str, Any], reference: dict[str, Any]) -> float:
    """Largest deviation of a final weight, relative to the largest weight of its variable."""
    assert record["weights"].keys() == reference["weights"].keys()
    worst = 0.0
    for name, value in reference["weights"].items():
        expected, got = np.array(value), np.array(record["weights"][name])
        worst = max(worst, _finite(float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-3))))
    return worst


def allowed(noise_runs: list[dict[str, Any]], reference: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Return the deviations that rounding noise allows, at each step and for the final weights.

    Args:
        noise_runs: runs on one device that differ from the reference only in rounding.
    """
    spread = np.max([deviations(run, reference) for run in noise_runs], axis=0)
    steps = np.maximum(np.maximum.accumulate(spread) * NOISE_FACTOR, TOLERANCE)
    return steps, max(max(weight_deviation(run, reference) for run in noise_runs) * NOISE_FACTOR, TOLERANCE)


def _largest(own: dict[str, float], other: dict[str, float]) -> float:
    assert own.keys() == other.keys(), (own, other)
    # values near zero (a loss of 1e-9) are compared absolutely
    return max(_finite(abs(own[name] - other[name]) / max(abs(other[name]), 1e-2)) for name in other)


def _finite(deviation: float) -> float:
    """Return infinity for NaN, which would pass every comparison otherwise."""
    return float("inf") if np.isnan(deviation) else deviation
