"""Processes learn from each other where their data ends, which step was spoilt, and what each knows."""

from __future__ import annotations

import json

import pytest

from distlaunch.base.errors import DataError
from distlaunch.data.differences import FirstPass, check_ends, check_passes, different_lengths, kind_of
from distlaunch.strategies.coordination import Peers, Vote
from distlaunch.strategies.replica.agreement import Ballots
from tests.unit.test_peers import in_each

NAMES = ["worker:0", "worker:1", "worker:2"]


@pytest.mark.parametrize("ended", [[False] * 3, [True] * 3])
def test_ends_that_are_the_same(ended: list[bool]) -> None:
    check_ends(ended, NAMES, 5, "training")


@pytest.mark.parametrize("ended", [[False, True, False], [True, True, False]])
def test_ends_that_differ(ended: list[bool]) -> None:
    with pytest.raises(
        DataError, match=r"validation data of .*ended after 1,250 global batches in .*worker:1, but not in .*worker:2"
    ):
        check_ends(ended, NAMES, 1250, kind_of("validation:once"))


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {"worker:0": FirstPass(None, 9), "worker:1": FirstPass(None, 2)},
        {"worker:0": FirstPass(3, 3), "worker:1": FirstPass(None, 3), "worker:2": FirstPass()},
    ],
)
def test_passes_that_may_be_the_same(seen: dict[str, FirstPass]) -> None:
    check_passes(seen, "training")


def test_passes_that_differ() -> None:
    seen = {"worker:0": FirstPass(6, 6), "worker:1": FirstPass(2, 2), "worker:2": FirstPass(None, 4)}
    told = r"after 2 global batches in worker:1, but not in worker:0 \(6\), worker:2 \(at least 4\);"
    with pytest.raises(DataError, match=f"read training data of .* {told}"):
        check_passes(seen, "training")


def test_lengths() -> None:
    assert different_lengths({"worker:0": "9 examples", "worker:1": "9 examples"}) == ""
    assert "worker:0 has 9; worker:1 has 8" in different_lengths({"worker:0": "9", "worker:1": "8"})


def test_all_know_what_each_says() -> None:
    found, store = in_each(3, lambda peers: [peers.gather(f"I am {peers.rank}\n") for _ in range(2)])
    assert found == [[["I am 0\n", "I am 1\n", "I am 2\n"]] * 2] * 3
    assert not store.values


def test_the_sum_of_ballots_holds_what_each_process_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["a:1", "b:1", "c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    ballots = [Ballots(Peers(3, rank, object())) for rank in range(3)]  # type: ignore[arg-type]
    votes = [Vote(next_steps=8), Vote(finish=True, next_steps=3), Vote(stop=False, next_steps=2)]
    seen = [(0, True), (7, True), (4, True)]
    total = sum(
        each.with_results(each.cast(vote), nonfinite, ended)
        for each, vote, (nonfinite, ended) in zip(ballots, votes, seen, strict=True)
    )
    for each in ballots:
        assert each.vote(total) == Vote(stop=False, finish=True, next_steps=8)
        assert each.first_nonfinite(total) == 4
        each.check_ends(total, 3, kind_of("train"))
    assert ballots[0].first_nonfinite(ballots[0].cast(Vote())) is None
