"""Selects few points of a large grid so that each pair of levels that is possible occurs in a selected point."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Point = dict[str, Any]
_STRIDE = 17  # a prime; those tried give 34 to 37 points of the parity grid, this one 35


def grid(factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Point], bool]) -> list[Point]:
    """Every combination of levels that is possible."""
    products = itertools.product(*factors.values())
    points = (dict(zip(factors, levels, strict=True)) for levels in products)
    return [point for point in points if is_possible(point)]


def pairs(point: Point) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """The pairs of levels that a point holds."""
    return set(itertools.combinations(point.items(), 2))


def covering(points: Sequence[Point]) -> list[Point]:
    """Greedy: always one of the points that add the most pairs. The same points give the same choice."""
    numbers: dict[Any, int] = {}
    table = np.array(
        [
            [numbers.setdefault(pair, len(numbers)) for pair in itertools.combinations(point.items(), 2)]
            for point in points
        ]
    )
    is_missing = np.ones(len(numbers), bool)
    chosen = []
    while is_missing.any():
        gains = is_missing[table].sum(1)
        best = np.flatnonzero(gains == gains.max())
        best = best[len(chosen) * _STRIDE % len(best)]  # from all over the grid, not always its first corner
        is_missing[table[best]] = False
        chosen.append(points[best])
    return chosen
