"""The message of an attempt whose data differs from that of the attempt before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from distlaunch.base.events import DataResolved, Event, RunEnded
from distlaunch.data.comparison import what_changed


def data(number: int | None = 9, *, types: str = "int64 ()", **hashes: str) -> DataResolved:
    seen = {"train": json.dumps({"types": types, "examples": hashes})}
    return DataResolved(name="m:data", source="here", examples={"train": number}, seen=seen)


def test_nothing_is_said_of_the_same_data() -> None:
    ended = RunEnded(status="failed", step=3, epochs_done=0, seconds=1.0, logs={})
    others: list[Any] = [[], [ended], [data(5), data(a="1"), ended], [data(None, a="1")]]
    for events in others:
        assert what_changed(events, data(a="1")) == ""
    old = DataResolved(name="m:data", source="here", examples={"train": 4})
    assert what_changed([old], data(a="1")) == "", "an older version has not told it"


@pytest.mark.parametrize(
    ("before", "difference"),
    [
        (data(8, a="1"), "8 examples in the last attempt, 9 in this one"),
        (data(9, a="2"), "example a is not the same in the last attempt and in this one"),
        (data(9, types="int8 ()", a="1"), "types in the last attempt: int8 (); in this one: int64 ()"),
    ],
)
def test_what_differs_is_named(before: Event, difference: str) -> None:
    told = what_changed([before], data(a="1"))
    assert told == f"data: the training data has changed since the last attempt: {difference}"


def test_data_that_workers_divide() -> None:
    """The chief's part says whether they have changed, if as many workers divide them."""

    def part(workers: int, value: str) -> DataResolved:
        seen = {"train": json.dumps({"workers": workers, "types": "", "examples": {"0": value}})}
        return DataResolved(name="m:data", source="here", examples={"train": 9}, seen=seen)

    assert what_changed([part(2, "a")], part(2, "a")) == ""
    assert "example 0 is not the same in the last attempt and in this" in what_changed([part(2, "a")], part(2, "b"))
    told = what_changed([part(2, "a")], part(3, "b"))
    assert told.startswith("data: 3 workers divide the training data, instead of 2 in the last attempt, so the batches")


def test_streams() -> None:
    def streams(number: int, **parts: str) -> DataResolved:
        facts = {"streams": number, "types": "", "parts": {name: [value] for name, value in parts.items()}}
        return DataResolved(name="m:data", source="here", examples={"train": None}, seen={"train": json.dumps(facts)})

    assert what_changed([streams(4, s0="a", s1="b")], streams(4, s0="a", s1="b")) == ""
    assert what_changed([streams(4, s0="a", s1="b")], streams(4, s0="a")) == "", "more workers: the chief reads fewer"
    assert "the first examples of s1 are not the same" in what_changed([streams(4, s1="b")], streams(4, s1="c"))
    assert "streams in the last attempt: 4; in this one: 2" in what_changed([streams(4)], streams(2))
