"""The choice of points of a grid: every pair that is possible, few points, always the same."""

from __future__ import annotations

import itertools

from tests.parity.grid import (
    IMPOSSIBLE,
    MAIN,
    MIXED,
    MORE,
    OPTIMIZERS_IN_CI,
    full,
    full_mixed,
    in_ci,
    is_possible,
    name_of,
    selected,
    selected_mixed,
)
from tests.parity.pairwise import Point, covering, grid, pairs


def test_every_pair_of_a_small_grid() -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y", "z"), "c": (False, True)}
    chosen = covering(grid(factors, lambda at: (at["a"], at["b"]) != (2, "z")))
    held = {pair for point in chosen for pair in pairs(point)}
    for (first, levels), (second, others) in itertools.combinations(factors.items(), 2):
        for level, other in itertools.product(levels, others):
            assert (((first, level), (second, other)) in held) == ((first, second, level, other) != ("a", "b", 2, "z"))
    assert len(chosen) <= 10  # of 16; 8 pairs of a and b are possible


def test_every_possible_pair_of_the_parity_grid() -> None:
    points = grid({**MAIN, **MORE}, in_ci)
    possible = set().union(*(pairs(point) for point in points))
    chosen = selected()
    assert set().union(*(pairs(point) for point in chosen)) == possible
    assert all(in_ci(point) for point in chosen)
    assert chosen == selected()
    assert len(chosen) < 8 * len(MAIN["strategy"])
    # every level of every factor takes part
    for name, levels in {**MAIN, **MORE, "optimizer": OPTIMIZERS_IN_CI}.items():
        assert {point[name] for point in chosen} == set(levels)


def test_a_reason_is_one_only_if_it_forbids_what_nothing_else_does() -> None:
    def is_forbidden_once(at: Point) -> bool:
        return sum(rule(at) for _, rule in IMPOSSIBLE) == 1

    points = grid({**MAIN, **MORE}, is_forbidden_once) + grid(MIXED, is_forbidden_once)
    for reason, rule in IMPOSSIBLE:
        assert any(map(rule, points)), reason


def test_full_grid_is_the_product_of_the_main_factors() -> None:
    points = full()
    main = [tuple(point[name] for name in MAIN) for point in points]
    assert len(set(main)) == len(main) > 1000
    assert len({name_of(point) for point in points}) == len(points)
    assert all(map(is_possible, points))
    expected = {tuple(at.values()) for at in grid(MAIN, lambda at: any(is_possible({**at, **m}) for m in MORE_POINTS))}
    assert set(main) == expected
    for name, levels in MORE.items():
        shares = [sum(point[name] == level for point in points) / len(points) for level in levels]
        assert min(shares) > 0.1, (name, shares)


def test_mixed_precision_takes_part_under_every_strategy() -> None:
    chosen = selected_mixed()
    for strategy in MAIN["strategy"]:
        found = {(at["precision"], at["loop"]) for at in chosen if at["strategy"] == strategy}
        assert {precision for precision, _ in found} == set(MIXED["precision"])
        assert {loop for _, loop in found} == set(MIXED["loop"])
    assert all(point in full_mixed() for point in chosen)


MORE_POINTS = grid(MORE, lambda _: True)
