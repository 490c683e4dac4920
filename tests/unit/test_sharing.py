"""Streams give the same batches to any number of workers; workers with their own data all end at the same step."""

from __future__ import annotations

import glob
import gzip
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

from distlaunch.base.errors import ConfigError  # noqa: E402
from distlaunch.config.read.load import load_config  # noqa: E402
from distlaunch.config.run import Data  # noqa: E402
from distlaunch.data.batches import Share, Source  # noqa: E402
from distlaunch.data.context import StreamContext, WorkerContext  # noqa: E402
from distlaunch.data.differences import describe_duplicates  # noqa: E402
from distlaunch.data.rows import split_rows  # noqa: E402
from distlaunch.data.source import make_split  # noqa: E402
from distlaunch.data.splits import StreamData, read_splits  # noqa: E402
from tests.documents import snippet  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")


def config(**keys: Any) -> Data:
    return Data.model_validate({"function": "unused:unused", "global_batch": 8, **keys})


def numbers(stream: int, length: int) -> Any:
    """Examples 100 * stream, 100 * stream + 1, ...; of unknown length."""
    return tf.data.Dataset.range(100 * stream, 100 * stream + length).filter(lambda number: number >= 0)


def keyed(number: Any, seed: Any) -> Any:
    return number, seed


def read(source: Source, steps: int) -> list[list[Any]]:
    """Return what a worker reads in each step, without stand-in rows."""
    parts = split_rows(source, first_replica=0, num_local=1, num_replicas=1).take(steps)
    found = []
    for batch, rows, *_ in parts.as_numpy_iterator():
        leaves = [leaf[: int(rows)].tolist() for leaf in tf.nest.flatten(batch)]
        found.append(leaves[0] if len(leaves) == 1 else list(zip(*leaves, strict=True)))
    return found


@settings(max_examples=2, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from([False, True, 3]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
@example([5, 1, 7, 2], 2, True, True, True, None)
def test_any_number_of_workers_sees_the_same_batches(
    lengths: list[int], each: int, shuffle: Any, mapped: bool, forever: bool, draw: Any
) -> None:
    number = len(lengths)
    divisors = [workers for workers in range(1, number + 1) if number % workers == 0]
    workers = divisors[-1] if draw is None else draw.draw(st.sampled_from(divisors), "workers")
    keys = {"augment": f"{__name__}:keyed"} if mapped else {}
    data = config(global_batch=each * number, streams=number, shuffle=shuffle, **keys)

    def reader(worker: int, of: int) -> list[list[Any]]:
        here = range(worker * number // of, (worker + 1) * number // of)
        streams = StreamData({stream: numbers(stream, lengths[stream]) for stream in here}, number)
        split = make_split(streams, data, seed=1, training=True, share=Share(worker, of))
        return read(split.training_source(0, 0, ends_visible=not forever), 12)

    whole, parts = reader(0, 1), [reader(worker, workers) for worker in range(workers)]
    joined = [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)]
    if not forever:  # of one's own data a source is one pass
        end = whole.index([])
        whole, joined = whole[:end], joined[: end + 1]
        assert joined.pop() == []
        seen = [row[0] if mapped else row for row in itertools.chain(*whole)]
        assert sorted(seen) == [100 * s + at for s, length in enumerate(lengths) for at in range(length)]
    assert joined == whole
    seeds = [tuple(row[1]) for row in itertools.chain(*whole)] if mapped else []
    assert forever or len(set(seeds)) == len(seeds)


def test_a_pass_of_ones_own_data_ends_with_the_longest_of_all() -> None:
    x = tf.range(5)
    split = make_split((x, x), config(global_batch=4), seed=0, training=True, share=Share(1, 2))
    assert [len(rows) for rows in read(split.with_length(4, None).training_source(0, 0, ends_visible=False), 8)] == [
        2, 2, 1, 0, 2, 2, 1, 0,
    ]  # fmt: skip
    resumed = read(split.with_length(4, None).training_source(1, 2, ends_visible=False), 3)
    whole = read(split.with_length(4, None).training_source(1, 0, ends_visible=False), 5)
    assert resumed == whole[2:]
    assert [len(rows) for rows in read(split.evaluation_source(), 6)] == [2, 2, 1, 0, 0, 0]


def given_context(context: Any) -> Any:
    if isinstance(context, WorkerContext):
        return {"train": ([context.worker], [context.num_workers])}
    return tf.data.Dataset.range(context.stream, context.stream + context.num_streams)


def as_arrays(context: Any) -> Any:
    return ([1.0], [1.0])


def test_who_gets_which_streams() -> None:
    streams = read_splits(config(function=f"{__name__}:given_context", streams=6), WorkerContext(3, 1)).train
    assert {stream: list(data.as_numpy_iterator()) for stream, data in streams.streams.items()} == {
        2: list(range(2, 8)), 3: list(range(3, 9)),
    }  # fmt: skip
    own = read_splits(config(function=f"{__name__}:given_context", sharding="function"), WorkerContext(3, 1)).train
    assert own == ([1], [3])
    with pytest.raises(ConfigError, match="returned list as train for stream 0; with `data"):
        read_splits(config(function=f"{__name__}:as_arrays", streams=2))
    assert StreamContext(2, 1).stream == 1


def test_the_same_examples_for_two_are_a_mistake() -> None:
    def facts(*hashes: str, types: str = "int64 ()") -> dict[str, Any]:
        return {"types": types, "examples": dict(enumerate(hashes))}

    assert describe_duplicates({"a": facts("1", "2"), "b": facts("2", "3")}) == ""
    assert describe_duplicates({"a": facts("1", "1"), "b": facts("1", "1")}) == "", "made-up data may be all alike"
    assert describe_duplicates({"a": facts("1", "2"), "b": facts("1", "2")}).startswith("a and b got the same examples")
    assert "float32 (2), not" not in describe_duplicates({"a": facts("1"), "b": facts("2", types="float32 (2)")})
    assert "int64 () in a, float32 (2) in b" in describe_duplicates(
        {"a": facts("1"), "b": facts("2", types="float32 (2)")}
    )
    parts = {"types": "", "parts": {"stream 0": ["1", "2"], "stream 1": ["1", "2"]}}
    assert describe_duplicates({"a": parts}).startswith("stream 0 and stream 1 got the same")


BASE = """
model: {function: "mine.py:model"}
data: {function: "mine.py:data", global_batch: 8%s}
strategy: {kind: %s}
cluster: {workers: %s, ps: %s}
train: {epochs: 1}
"""
MULTI = ("multi_worker_mirrored", 3, 0)
SERVERS = ("parameter_server", 2, 1)
WRONG = [
    (
        ", sharding: shuffled",
        MULTI,
        "data.sharding: got 'shuffled', but all workers of multi_worker_mirrored take",
    ),
    (
        ", sharding: function, train_examples: 4",
        MULTI,
        "data.train_examples: got 4, but with `data.sharding: function`",
    ),
    (
        ", sharding: function",
        SERVERS,
        "train.steps_per_epoch: missing: with `data.sharding: function`, no process knows",
    ),
    (", sharding: function, args: {context: 1}", MULTI, "data.args.context: distlaunch passes it"),
    (
        ", streams: 4",
        MULTI,
        "data.streams: got 4, which 3 workers cannot share equally; use a multiple of 3, or 1, 2 or 4",
    ),
    (
        ", streams: 4",
        ("multi_worker_mirrored", 2**62 + 1, 0),  # more than anybody could count up to
        f"data.streams: got 4, which {2**62 + 1} workers cannot share equally",
    ),
    (", streams: 3", MULTI, "data.global_batch: got 8, which 3 streams cannot share equally; use 6 or 9"),
    (", streams: 2", SERVERS, "data.streams: got 2, but parameter_server assigns any batch to any worker"),
    (", streams: 2, batched: true", ("mirrored", 1, 0), "data.batched: got true, but each stream provides a part"),
    (
        ", streams: 2, sharding: function",
        ("mirrored", 1, 0),
        "data.sharding: got 'function', but distlaunch assigns the streams",
    ),
    (
        ", streams: 2, remainder: drop",
        ("mirrored", 1, 0),
        "data.remainder: got 'drop', but the last batches differ in size",
    ),
    (", streams: 2, on_error: skip", ("mirrored", 1, 0), "data.on_error: got 'skip', but the examples of a stream"),
    (
        ", streams: 2, validation_examples: 2",
        ("mirrored", 1, 0),
        "data.validation_examples: got 2, but with `data.stre",
    ),
    ("", ("mirrored", 1, 0), "data.function: data(context) gets `context` only with `data.sharding: function` or"),
]


@pytest.mark.parametrize(("keys", "where", "message"), WRONG)
def test_what_does_not_fit_is_named(keys: str, where: tuple[str, int, int], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def model(): ...\ndef data(context): ...\n")
    path = tmp_path / "mine.yaml"
    path.write_text(BASE % (keys, *where))
    with pytest.raises(ConfigError) as raised:
        load_config(path, environ={})
    told = [f"{'.'.join(map(str, problem.key))}: {problem.message}" for problem in raised.value.problems]
    assert any(line.startswith(message) for line in told), told


def test_a_function_without_context_is_told_to_take_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def model(): ...\ndef data(rows=3): ...\n")
    path = tmp_path / "mine.yaml"
    path.write_text(BASE % (", sharding: function", "multi_worker_mirrored", 2, 0))
    with pytest.raises(
        ConfigError, match=r"with `context`, which data\(rows=3\) does not take; write `def data\(rows, c"
    ):
        load_config(path, environ={})


def test_the_snippets_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    for number in range(3):
        with gzip.open(tmp_path / "logs" / f"{number}.gz", "wt") as file:
            file.write(f"{number}\n")
    names: dict[str, Any] = {"tf": tf, "np": np, "glob": glob}
    exec(snippet("input.md", "def lines(context):"), names)
    lines = [list(names["lines"](StreamContext(2, stream))["train"].as_numpy_iterator()) for stream in (0, 1)]
    assert lines == [[b"0", b"2"], [b"1"]]
    np.savez(tmp_path / "train.npz", x=np.arange(5), y=np.arange(5) * 2)
    exec(snippet("input.md", "def own_part(context):"), names)
    x, y = names["own_part"](WorkerContext(2, 1))["train"]
    assert (x.tolist(), y.tolist()) == ([1, 3], [2, 6])


def test_streams_that_cannot_be_joined_are_named() -> None:
    empty = StreamData({0: numbers(0, 3), 1: numbers(1, 0)}, 2)
    with pytest.raises(ConfigError, match=r"stream 1 of 2 has no validation examples, .*`\.shard\(context\.num_st"):
        make_split(empty, config(streams=2), seed=0, training=False)

    def rows(size: int) -> Any:
        return tf.data.Dataset.from_generator(lambda: iter([[0.0] * size]), output_signature=tf.TensorSpec([None]))

    with pytest.raises(
        ConfigError, match=r"training examples of stream 1 have the shapes \[\(4,\)\], but those of stream 0"
    ):
        make_split(StreamData({0: rows(3), 1: rows(4)}, 2), config(streams=2), seed=0, training=True)


NO_EXAMPLES = {
    "arrays": lambda: (np.zeros((0, 2)), np.zeros(0)),
    "dataset": lambda: tf.data.Dataset.range(0),
    "of unknown length": lambda: tf.data.Dataset.range(3).filter(lambda at: at > 5),
}


@pytest.mark.parametrize("kind", NO_EXAMPLES)
def test_a_worker_without_examples_is_named(kind: str) -> None:
    with pytest.raises(ConfigError, match="worker 1 of 2 has no training examples"):
        make_split(NO_EXAMPLES[kind](), config(), seed=0, training=True, share=Share(1, 2))
