"""`data.on_error: skip`: an example that fails is replaced by the next one, for any number of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

from distlaunch.base.errors import ConfigError, DataError  # noqa: E402
from distlaunch.config.run import Data  # noqa: E402
from distlaunch.data.examples.pending_events import take_events  # noqa: E402
from distlaunch.data.examples.read_failures import data_errors_raised, forget_failures  # noqa: E402
from distlaunch.data.examples.skipping import read_first_readable  # noqa: E402
from distlaunch.data.rows import split_rows  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
NUMBER = 12


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """Forget what runs of other tests in this process have left."""
    forget_failures()
    take_events()


class Items:
    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError("broken")
        return index, float(index)


def spoilt(number: Any) -> Any:
    return tf.strings.to_number(tf.where(number % 5 == 0, "none", tf.strings.as_string(number)), tf.int64)


def config(**keys: Any) -> Data:
    return Data.model_validate({"function": "m:f", "global_batch": 5, "on_error": "skip", **keys})


def read(data: Any, section: Data, replicas: int = 1, passes: int = 2) -> list[int]:
    source = make_split(data, section, seed=3, training=True).training_source(0, 0, ends_visible=False)
    parts = [
        split_rows(source, first_replica=replica, num_local=1, num_replicas=replicas).take(3 * passes)
        for replica in range(replicas)
    ]
    seen: list[int] = []
    with data_errors_raised():
        for elements in zip(*parts, strict=True):
            for batch, rows, *_ in elements:
                seen += tf.nest.flatten(batch)[0][: int(rows)].numpy().tolist()
    return seen


def events() -> list[Any]:
    return list(take_events())


def test_the_first_rows_have_a_replacement_too() -> None:
    """These rows are read eagerly, to learn the shapes."""
    split = make_split(Items({1}), config(), seed=3, training=True)
    assert split.first_rows(2)[0].numpy().tolist() == [0, 2]
    assert [event.example for event in events()] == ["example 1"]


@settings(max_examples=5, deadline=None)
@given(st.sets(st.integers(0, NUMBER - 1), max_size=NUMBER - 2), st.integers(2, 3))
def test_the_next_takes_its_place(bad: set[int], replicas: int) -> None:
    take_events()
    one = read(Items(bad), config())
    whole = read(Items(set()), config())
    assert one == [next(n for n in [*range(at, NUMBER), *range(at)] if n not in bad) for at in whole]
    assert sorted(skipped.example for skipped in events()) == sorted(f"example {number}" for number in bad)
    assert read(Items(bad), config(), replicas) == one


def test_a_map_that_fails() -> None:
    take_events()
    numbers = np.arange(NUMBER)
    seen = read(numbers, config(map=f"{__name__}:spoilt", shuffle=False), passes=1)
    assert seen == [1, 1, 2, 3, 4, 6, 6, 7, 8, 9, 11, 11]
    told = sorted(events(), key=lambda skipped: int(skipped.example.split()[-1]))  # of two batches made at once
    assert [skipped.example for skipped in told] == [f"example {number}" for number in (0, 5, 10)]
    assert all("could not correctly convert string: none (" in skipped.reason for skipped in told)
    assert all("test_skipping.py:" in skipped.reason for skipped in told)


def test_the_limit() -> None:
    named = r"\(example 1, example 2, example 3\)"
    with pytest.raises(DataError, match=rf"more examples fail {named} than data\.skip_limit allows \(2\)"):
        read(Items({1, 2, 3}), config(skip_limit=2))
    with pytest.raises(DataError, match="no example can be read; the last error: example "):
        read(np.zeros(NUMBER, np.int64), config(map=f"{__name__}:spoilt"))


def test_where_nothing_can_take_its_place() -> None:
    with pytest.raises(ConfigError, match=r"no other example can replace one that fails.*`\.ignore_errors\(\)`"):
        make_split(tf.data.Dataset.range(3), config(), seed=0, training=True)
    make_split(tf.data.Dataset.range(3), config(), seed=0, training=False)
    source = make_split(Items({1}), config(), seed=0, training=False).evaluation_source()
    first = split_rows(source, first_replica=0, num_local=1, num_replicas=1).take(1)
    with pytest.raises(DataError, match="validation example 1 cannot be read: OSError: broken"), data_errors_raised():
        list(first)


def test_samples_may_fail() -> None:
    assert read_first_readable(lambda number: 1 // number, 0, 9) == 1
    with pytest.raises(DataError, match=r"all of the 9 examples .* fail; the last error: integer division"):
        read_first_readable(lambda number: 1 // 0, 0, 9)
    assert make_split(Items({0, 6, NUMBER - 1}), config(), seed=0, training=True).describe()
