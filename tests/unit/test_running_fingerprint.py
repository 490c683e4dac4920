"""Tests that processes also compare what pipelines give after their first examples, at the ends of epochs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from distlaunch.base.errors import ConfigError  # noqa: E402
from distlaunch.config.run import Data  # noqa: E402
from distlaunch.data.running_fingerprint import RunningFingerprint  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402
from distlaunch.data.split import Split  # noqa: E402

NUMBER, BATCH = 40, 6
BATCHES = 7  # in a pass


class Processes:
    """Two that compare with each other, each in a thread: both ask for the same, and wait for what the other tells."""

    def __init__(self) -> None:
        self.running = [RunningFingerprint(lambda text, at=at: self._gather(at, text)) for at in range(2)]
        self.asked = 0
        self._told, self._meeting = ["", ""], threading.Barrier(2, timeout=30)

    def _gather(self, at: int, text: str) -> dict[str, str]:
        self._told[at] = text
        self._meeting.wait()
        told = {f"worker:{number}": each for number, each in enumerate(self._told)}
        self.asked += at == 0
        # neither may tell something new before both have seen this
        self._meeting.wait()
        return told

    def compare(self, batches: int, first_step: int = 0) -> None:
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(running.compare, batches, first_step) for running in self.running]
        mine, other = (end.exception() for end in ends)
        assert str(mine) == str(other), "both see the same"
        if mine is not None:
            raise mine


def values(at: int) -> Callable[[Any], Any]:
    """A number that changes at one example."""
    return lambda index: index + tf.cast(index == at, tf.int64) * 1000


KINDS: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda value: (tf.cast(value, tf.float32), value),
    "text": lambda value: {"a": tf.strings.as_string(value)},
    "ragged": lambda value: (tf.RaggedTensor.from_row_lengths(tf.range(value % 3), [value % 3]), value),
    "sparse": lambda value: (tf.SparseTensor([[0, 1]], [value], [1, 4]), value),
}


def split_of(kind: str, different: int, *, mapped: bool, batched: bool = False, shuffle: bool = False) -> Split:
    import distlaunch.data.source as source
    from distlaunch.data.examples.each_example import ExampleMap

    data = tf.data.Dataset.range(NUMBER).map(values(different)).map(KINDS[kind])
    data = data.batch(BATCH) if batched else data
    config = Data.model_validate(
        {"function": "unused:unused", "global_batch": BATCH, "batched": batched, "shuffle": shuffle, "args": {}}
    )
    with pytest.MonkeyPatch.context() as patch:
        function = ExampleMap(lambda *parts: 0) if mapped else None
        patch.setattr(source, "example_map", lambda config, seed, training: function)
        return make_split(data, config, seed=3, training=True)


def read(split: Split, passes: int, *, ends_visible: bool = True) -> None:
    elements = split.training_source(0, 0, ends_visible=ends_visible, passes=passes).elements
    for _ in elements.take(passes * (BATCHES + ends_visible)):
        pass


@pytest.fixture(params=[False, True], ids=["no map", "map"])
def mapped(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_where_it_begins_to_differ_is_found(kind: str, mapped: bool) -> None:
    processes = Processes()
    # the first of a batch, which is looked at
    for running, different in zip(processes.running, (-1, 4 * BATCH), strict=True):
        read(split_of(kind, different, mapped=mapped).with_running_fingerprint(running), 1)
    processes.compare(4)
    with pytest.raises(ConfigError, match=r"worker:1 and worker:0 have read different training data since step 105;"):
        processes.compare(BATCHES, first_step=100)
    assert processes.asked < 8


@pytest.mark.parametrize("shape", ["examples", "batches", "shuffled"])
def test_equal_data_are_equal(shape: str, mapped: bool) -> None:
    """Marks of ends are no batches, and what is read ahead makes no difference."""
    processes = Processes()
    for running, passes in zip(processes.running, (2, 3), strict=True):
        split = split_of("numbers", -1, mapped=mapped, batched=shape == "batches", shuffle=shape == "shuffled")
        read(split.with_running_fingerprint(running), passes, ends_visible=passes == 2)
    processes.compare(BATCHES)
    processes.compare(2 * BATCHES)
    assert processes.asked == 2


def test_reading_begins_anew() -> None:
    processes = Processes()
    for running, times in zip(processes.running, (1, 2), strict=True):
        for _ in range(times):
            read(split_of("numbers", -1, mapped=False).with_running_fingerprint(running), 1)
    processes.compare(BATCHES)


def test_a_dataset_within_the_dataset_is_refused() -> None:
    config = Data.model_validate({"function": "unused:unused", "global_batch": 2, "args": {}})
    with pytest.raises(ConfigError, match=r"each example contains a dataset, as after `.window\(\)`; add `.flat_map"):
        make_split(tf.data.Dataset.range(8).window(2), config, seed=0, training=True)


@given(st.integers(1, 60), st.data())
def test_any_first_difference_is_found(number: int, data: Any) -> None:
    different = data.draw(st.integers(1, number))
    equal = data.draw(st.integers(0, different - 1))
    processes = Processes()
    for at, running in enumerate(processes.running):
        for batch in range(1, number + 1):
            running.record(np.asarray([batch, at if batch >= different else 0]))
    if equal:
        processes.compare(equal)
    with pytest.raises(ConfigError, match=rf"since step {different};"):
        processes.compare(number)
