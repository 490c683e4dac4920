"""Finds the first layer of a model that deviates from the reference, by its outputs or its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from distlaunch.base.run_files.trial_records import Series
from distlaunch.verify.judge import NOISE_FACTOR, TOLERANCE

_SMALLEST_NORM = 1e-3
"""Gradients below this part of the step's largest are compared with that part: a bias may have none but rounding."""

T = TypeVar("T")
Triples = Iterator[tuple[str, T, T]]
Deviations = dict[str, float]


def first_to_deviate(trial: Series, reference: Series, noise: Sequence[Series]) -> str:
    """A clause on the first layer whose output leaves the reference, or variable whose gradient does.

    Steps are followed in their order; within one, layers in the order of their computation, then gradients, which are
    computed from the last layer to the first.

    Args:
        noise: runs on one device that differ from the reference in rounding only.
    """
    grown: dict[tuple[str, str], float] = {}
    steps = min(len(trial.variables), len(reference.variables))
    for step in range(steps):
        for what, compare in _KINDS:
            for run in noise:
                for name, value in compare(run, reference, step).items():
                    known = value if math.isfinite(value) else 0.0
                    grown[what, name] = max(grown.get((what, name), 0.0), known)
            for name, value in compare(trial, reference, step).items():
                # `not <=`: NaN deviates
                if not value <= max(TOLERANCE, NOISE_FACTOR * grown.get((what, name), 0.0)):
                    return f"the first to deviate is the {what} of {name}, in step {step + 1}"
    return f"the outputs of all layers and all gradients are equal up to step {steps}" if steps else ""


def _of_outputs(run: Series, reference: Series, step: int) -> Deviations:
    return {name: _off(own, expected) for name, own, expected in _pairs(run.outputs, reference.outputs, step)}


def _off(own: Sequence[float], expected: Sequence[float]) -> float:
    """The largest deviation of a fact, relative to the root of the mean square."""
    if own[0] != expected[0]:  # another number of values
        return math.inf
    ours, theirs = _means(own), _means(expected)
    scale = max(theirs[2], TOLERANCE)
    deviations = [abs(one - other) / scale for one, other in zip(ours, theirs, strict=True)]
    return max(deviations) if all(map(math.isfinite, deviations)) else math.inf


def _means(facts: Sequence[float]) -> tuple[float, ...]:
    number, total, magnitudes, squares, projected = facts
    if not all(map(math.isfinite, facts)):
        return (math.nan,) * 4
    number = number or 1
    return total / number, magnitudes / number, math.sqrt(squares / number), math.sqrt(projected / number)


def _of_gradients(run: Series, reference: Series, step: int) -> Deviations:
    floor = max(reference.variables[step].values(), default=0.0) * _SMALLEST_NORM or TOLERANCE
    # gradients are computed from the last layer to the first
    pairs = reversed(list(_pairs(run.variables, reference.variables, step)))
    found = {name: abs(own - expected) / max(expected, floor) for name, own, expected in pairs}
    return {name: value if math.isfinite(value) else math.inf for name, value in found.items()}


def _pairs(run: Sequence[Mapping[str, T]], reference: Sequence[Mapping[str, T]], step: int) -> Triples[T]:
    """Name and both values, in the reference's order, of what both have."""
    if step < len(run) and step < len(reference):
        for name, expected in reference[step].items():
            if name in run[step]:
                yield name, run[step][name], expected


_KINDS: tuple[tuple[str, Callable[[Series, Series, int], Deviations]], ...] = (
    ("output", _of_outputs),
    ("gradient", _of_gradients),
)
