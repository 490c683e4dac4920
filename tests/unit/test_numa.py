"""Which cores tasks get on hosts with several NUMA nodes, as Linux describes such hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.cluster.cores import Cores, NumaShares, node_cores, numa_shares


def host(folder: Path, *cpulists: str) -> Path:
    for number, text in enumerate(cpulists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(text + "\n")
    (folder / "possible").write_text("0\n")
    return folder


def cores(first: int, last: int) -> Cores:
    return frozenset(range(first, last + 1))


TWO = [cores(0, 3), cores(4, 7)]
ALL = cores(0, 7)


@pytest.mark.parametrize(
    ("num_tasks", "nodes", "usable", "expected"),
    [
        (2, TWO, ALL, TWO),
        (4, TWO, ALL, [TWO[0], TWO[0], TWO[1], TWO[1]]),
        (1, TWO, ALL, []),
        (3, TWO, ALL, []),
        (2, [ALL], ALL, []),
        (2, [], ALL, []),
        (2, TWO, cores(0, 5), []),  # a scheduler has bound this process
        (2, [cores(0, 1), cores(2, 7)], ALL, []),
        (2, [*TWO, frozenset()], ALL, TWO),  # a node with memory only
    ],
)
def test_nodes_are_shared_out_equally_or_not_at_all(
    num_tasks: int, nodes: list[Cores], usable: Cores, expected: list[Cores]
) -> None:
    assert numa_shares(num_tasks, nodes, usable, 8) == expected


@given(num_nodes=st.integers(1, 8), size=st.integers(1, 16), num_tasks=st.integers(0, 64))
def test_each_core_has_as_many_tasks_as_each_other(num_nodes: int, size: int, num_tasks: int) -> None:
    nodes = [cores(number * size, (number + 1) * size - 1) for number in range(num_nodes)]
    dealt = numa_shares(num_tasks, nodes, cores(0, num_nodes * size - 1), num_nodes * size)
    if dealt:
        assert [dealt.count(node) for node in nodes] == [num_tasks // num_nodes] * num_nodes


def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    assert node_cores(host(tmp_path, *(["0-1,16"] + [str(number) for number in range(2, 12)])))[:3] == [
        frozenset({0, 1, 16}), frozenset({2}), frozenset({3}),
    ]  # fmt: skip
    assert node_cores(tmp_path)[-1] == frozenset({11})
    assert node_cores(tmp_path / "none") == []
    (tmp_path / "node3" / "cpulist").write_text("what?\n")
    assert node_cores(tmp_path) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_task_keeps_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < (os.cpu_count() or 1) or len(usable) % 2:
        pytest.skip("bound, or an odd number of cores")
    half = len(usable) // 2
    lists = [",".join(map(str, part)) for part in (usable[:half], usable[half:])]
    monkeypatch.setattr("distlaunch.cluster.cores.NODES", host(tmp_path, *lists))
    dealt = NumaShares(2)
    first, second, beside = (dealt.of(name, {}) for name in ("worker:0", "worker:1", "evaluator:0"))
    assert [sorted(first), sorted(second), sorted(beside)] == [usable[:half], usable[half:], []]
    assert dealt.of("worker:1", {}) == second
    assert dealt.of("worker:1", {"CUDA_VISIBLE_DEVICES": "-1"}) == second
    assert not dealt.of("worker:1", {"CUDA_VISIBLE_DEVICES": "0"})
