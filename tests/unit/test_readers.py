"""Batches by number are those of one device, whatever the order of requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distlaunch.config.run import RunConfig

tf = pytest.importorskip("tensorflow")

from distlaunch.data.batches import Source  # noqa: E402
from distlaunch.data.differences import FirstPass  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402
from distlaunch.data.splits import Splits  # noqa: E402
from distlaunch.strategies.parameter_server import worker_batches  # noqa: E402
from distlaunch.strategies.parameter_server.numbered_batches import Reader, offer_splits  # noqa: E402
from tests.unit.test_data import BATCH, KINDS, ROWS, as_arrays, as_dataset, batches, config, joined, seeded  # noqa: E402

__all__ = ["seeded"]
pytestmark = pytest.mark.usefixtures("seeded")
PER_PASS = -(-ROWS // BATCH)


def rows(batch: Any) -> list[int]:
    x, y = batch
    assert (np.asarray(y) == np.asarray(x) * 10).all()
    return np.asarray(x).tolist()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 11, 12), (7, 3, 12, 0, 4, 5), (12, 11, 0, 0, 9, 1)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_host", [True, False])
def test_a_number_means_the_batch_of_that_step(kind: str, order: tuple[int, ...], on_host: bool) -> None:
    split = make_split(KINDS[kind](), config(), seed=3, training=True)
    visible = split.num_batches is None
    expected = [b for b in batches(split.training_source(0, 0, ends_visible=visible), 16) if b]
    reader = Reader(make_split(KINDS[kind](), config(), seed=3, training=True, on_host=on_host), once=False)
    assert [rows(reader.read(number)) for number in order] == [expected[number] for number in order]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_host", [True, False])
def test_one_pass_ends(kind: str, on_host: bool) -> None:
    reader = Reader(make_split(KINDS[kind](), config(), seed=3, training=False, on_host=on_host), once=True)
    read = [rows(reader.read(number)) for number in (*range(PER_PASS + 2), 1)]
    assert joined(read[:PER_PASS]) == list(range(ROWS))
    assert read[PER_PASS:] == [[], [], [5, 6, 7, 8, 9]]


def test_the_end_is_remembered() -> None:
    """Asking for batches past the end does not read the split again."""
    opened = []

    def rows_of() -> Any:
        opened.append(1)
        yield from zip(*as_arrays(), strict=True)

    spec = (tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64))
    made = make_split(tf.data.Dataset.from_generator(rows_of, output_signature=spec), config(), seed=0, training=False)
    reader = Reader(made, once=True)
    opened.clear()
    assert [len(rows(reader.read(number))) for number in range(12)] == [5, 5, 5, 5, 3] + [0] * 7
    assert len(opened) == 1


@pytest.mark.parametrize("once", [True, False])
def test_a_reader_tells_how_far_the_first_pass_goes(once: bool) -> None:
    reader = Reader(make_split(KINDS["unknown length"](), config(), seed=0, training=not once), once=once)
    assert reader.first_pass == FirstPass(None, 0)
    reader.read(2)
    assert reader.first_pass == FirstPass(None, 3)
    reader.read(0)
    assert reader.first_pass == FirstPass(None, 3)
    reader.read(3 * PER_PASS)
    assert reader.first_pass == FirstPass(PER_PASS, PER_PASS)


def job(**data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"function": "unused:unused"},
            "data": {"function": "unused:unused", "global_batch": BATCH, **data},
            "strategy": {"kind": "parameter_server"},
            "cluster": {"workers": 2, "ps": 1},
        }
    )


@pytest.mark.parametrize("make", [as_arrays, as_dataset], ids=["arrays", "dataset"])
def test_workers_share_an_order_or_have_their_own(make: Any) -> None:
    def passes(sharding: str) -> list[list[int]]:
        run = job(sharding=sharding)
        train = make_split(make(), run.data, seed=0, training=True)
        offer_splits(run, Splits(make(), None, ""), train, None)
        offered = worker_batches.offered_split("train")
        read, num_batches = offered.read, offered.num_batches
        assert num_batches == PER_PASS
        return [joined([rows(read(worker, number)) for number in range(PER_PASS)]) for worker in (0, 1)]

    first, second = passes("rows")
    assert first == second
    first, second = passes("shuffled")
    assert first != second
    assert sorted(first) == sorted(second) == list(range(ROWS))


def test_a_graph_gets_the_batch_of_its_process() -> None:
    s = tf.constant(["a"])
    read = lambda worker, number: {"x": tf.fill([worker + 1, 2], float(number)), "s": s}  # noqa: E731
    worker_batches.offer("test", worker_batches.OfferedSplit(read, 9, lambda: "{}"))
    spec = {"x": tf.TensorSpec([None, 2], tf.float32), "s": tf.TensorSpec([1], tf.string)}

    @tf.function
    def graph(worker: Any, number: Any, num_batches: int | None = 9) -> Any:
        source = Source(None, lambda rows: rows, "test", num_batches=num_batches)
        return worker_batches.fetch(source, worker, number, spec)

    batch, count = graph(tf.constant(2, tf.int64), tf.constant(7, tf.int64))
    assert batch["x"].numpy().tolist() == [[7.0, 7.0]] * 3
    assert batch["s"].numpy().tolist() == [b"a"]
    assert int(count) in (1, 3)
    with pytest.raises(tf.errors.OpError):
        graph(tf.constant(2, tf.int64), tf.constant(7, tf.int64), 10)
    failure = worker_batches.read_failure()
    assert "chief has 10 global batches for training; worker:2 has 9" in str(failure)
