"""What a later attempt says of data that are not those of the attempt before."""

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
        (data(8, a="1"), "8 examples in the attempt before, 9 in this one"),
        (data(9, a="2"), "example a is not the same in the attempt before and in this one"),
        (data(9, types="int8 ()", a="1"), "types in the attempt before: int8 (); in this one: int64 ()"),
    ],
)
def test_what_differs_is_named(before: Event, difference: str) -> None:
    told = what_changed([before], data(a="1"))
    assert told == f"data: the training data have changed since the attempt before: {difference}"
