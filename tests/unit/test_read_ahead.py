"""Batches made before they are wanted: at most two, and not more than fit into some bytes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

from distlaunch.config.run import Data
from distlaunch.data import read_ahead
from distlaunch.data.batches import Source
from distlaunch.data.read_ahead import batches_ahead
from distlaunch.data.rows import rows_of_process, split_rows
from distlaunch.data.source import make_split
from distlaunch.patches import tensorflow_iterators
from distlaunch.patches.tensorflow_collectives import mirrored_strategy

pytestmark = pytest.mark.usefixtures("virtual_devices")
PIXELS = tf.TensorSpec([None, 224, 224, 3], tf.float32)  # 602,112 bytes
LABEL = tf.TensorSpec([None], tf.int64)


@pytest.mark.parametrize(
    ("spec", "rows", "batches"),
    [
        ((PIXELS, LABEL), 64, 2),
        ((PIXELS, LABEL), 212, 2),
        ((PIXELS, LABEL), 213, 1),
        ((PIXELS, LABEL), 100_000, 1),
        (PIXELS, None, 2),
        (LABEL, 0, 2),
        ({"a": PIXELS, "b": tf.TensorSpec([None], tf.string)}, 100_000, 2),
        ({"a": tf.TensorSpec([None, None], tf.float32)}, 100_000, 2),
        (tf.RaggedTensorSpec([None, None], tf.float32), 100_000, 2),
        (tf.SparseTensorSpec([None, 9], tf.float32), 100_000, 2),
        ((tf.TensorSpec(None, tf.float32),), 100_000, 2),
    ],
)
def test_large_batches_are_read_ahead_one_at_a_time(spec: object, rows: int | None, batches: int) -> None:
    assert batches_ahead(spec, rows) == batches


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("part_of_most", "ahead"), [(0.1, 2), (0.4, 2), (0.6, 1), (1.2, 1)])
def test_pipelines_hold_no_more(
    monkeypatch: pytest.MonkeyPatch, part_of_most: float, ahead: int, replicas: int
) -> None:
    """The batches that replicas and a process of a mesh load before the next step requests one."""
    monkeypatch.setattr(read_ahead, "MOST_BYTES", 80_000)
    batch, width = 8, round(part_of_most * 80_000 / 4 / 8)
    begun, grown = [0], threading.Condition()

    def count(place: tf.Tensor) -> tf.Tensor:
        with grown:
            begun[0] += 1
            grown.notify_all()
        return place

    def load(rows: tf.Tensor, *, at_once: int) -> tf.Tensor:
        with tf.control_dependencies([tf.py_function(count, [rows[0]], tf.int64)]):
            return tf.zeros([tf.shape(rows)[0], width])

    elements = tf.data.Dataset.range(batch).batch(batch).repeat()
    source = Source(elements, load, at_once=1, global_batch=batch)
    for parts, each in (
        (split_rows(source, first_replica=0, num_local=replicas, num_replicas=replicas), replicas),
        (rows_of_process(source, first=0, number=1, of=1), 1),
    ):
        begun[0] = 0
        iterator = iter(parts)
        for step in range(1, 5):
            for _ in range(each):
                next(iterator)
            with grown:
                all_of_it = functools.partial(lambda most: begun[0] >= most, (step + ahead) * each)
                assert grown.wait_for(all_of_it, 20), begun
                assert begun[0] == (step + ahead) * each


@pytest.mark.parametrize("share", ["of replicas", "of a process"])
def test_no_iterator_is_tuned(monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    """Freeing a tuned iterator sometimes waits for the tuning thread, for up to a minute."""
    tuned: list[bool | None] = []
    make = tf.data.Dataset.__iter__

    def noted(dataset: tf.data.Dataset) -> Iterator[Any]:
        tuned.append(dataset.options().autotune.enabled)
        return make(dataset)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", noted)
    source = Source(tf.data.Dataset.range(8).batch(4).repeat(), lambda rows, at_once: rows, global_batch=4)
    if share == "of a process":
        assert int(next(iter(rows_of_process(source, first=0, number=1, of=2)))[2]) == 4
    else:
        tensorflow_iterators.install()
        parts = split_rows(source, first_replica=0, num_local=2, num_replicas=2)
        tuned.append(parts.options().autotune.enabled)
        strategy = mirrored_strategy(["CPU:0", "CPU:1"])
        batch = next(iter(strategy.distribute_datasets_from_function(lambda _: parts)))[0]
        assert [int(rows[0]) for rows in strategy.experimental_local_results(batch)] == [0, 2]
        assert len(tuned) == 3, "the iterators of both devices"
    assert tuned
    assert not any(each is not False for each in tuned)


class Busy:
    """Examples that are being mapped `now`; `seen` has those of each moment when a mapping began."""

    changed = threading.Condition()
    now: ClassVar[set[int]] = set()
    seen: ClassVar[list[set[int]]] = []

    @classmethod
    def map(cls, number: np.int64) -> np.int64:
        with cls.changed:
            cls.now.add(int(number))
            cls.seen.append(set(cls.now))
            cls.changed.notify_all()
            cls.changed.wait_for(cls.spans_batches, 20)
            cls.now.remove(int(number))
        return number

    @classmethod
    def spans_batches(cls) -> bool:
        return any(len({number // 2 for number in numbers}) == 2 for numbers in cls.seen)


def mapped(number: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.numpy_function(Busy.map, [number], tf.int64), [])


def test_batches_made_at_once_share_the_threads() -> None:
    Busy.seen.clear()
    config = Data.model_validate(
        {"function": "m:f", "global_batch": 2, "map": f"{__name__}:mapped", "threads": 2, "shuffle": False}
    )
    split = make_split(np.arange(12), config, seed=0, training=True)
    source = split.training_source(0, 0, ends_visible=False, passes=1)
    parts = split_rows(source, first_replica=0, num_local=1, num_replicas=1)
    assert [batch.numpy().tolist() for batch, *_ in parts.take(6)] == [[at, at + 1] for at in range(0, 12, 2)]
    assert Busy.spans_batches()
    assert max(map(len, Busy.seen)) == 2
