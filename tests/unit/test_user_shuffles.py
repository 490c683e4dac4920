"""A pipeline that shuffles by itself: the order of a pass is that of an uninterrupted run, and of Keras's `fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.config.run import Data

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from distlaunch.data.source import make_split  # noqa: E402
from distlaunch.patches import tensorflow_shuffle  # noqa: E402
from tests.parity.attempts import losses_and_notices  # noqa: E402

HERE = "tests.unit.test_user_shuffles"
ROWS = 24
pytestmark = pytest.mark.usefixtures("virtual_devices")


def numbers() -> Any:
    return tf.data.Dataset.range(ROWS)


PIPELINES: dict[str, Callable[[], Any]] = {
    "unseeded": lambda: numbers().shuffle(ROWS),
    "seeded": lambda: numbers().shuffle(7, seed=3),
    "twice": lambda: numbers().shuffle(5).map(lambda number: number * 2).shuffle(9, seed=1),
    "repeated": lambda: numbers().shuffle(7).repeat(3),
    "endless": lambda: numbers().repeat().shuffle(7).take(40),
    "unknown length": lambda: numbers().filter(lambda number: number > 3).shuffle(6),
    "cached": lambda: numbers().shuffle(6).cache(),
    "concatenated": lambda: numbers().shuffle(6).concatenate(numbers().shuffle(7)),
    "zipped": lambda: tf.data.Dataset.zip((numbers().shuffle(6), numbers().shuffle(6, seed=2))).map(lambda a, b: a * b),
    "ragged": lambda: tf.data.Dataset.from_tensor_slices(
        tf.ragged.constant([[at] * (at % 3) for at in range(ROWS)])
    ).shuffle(8),
    "fixed": lambda: numbers().shuffle(8, seed=1, reshuffle_each_iteration=False),
    "within a function": lambda: tf.data.Dataset.range(4).flat_map(lambda at: numbers().shuffle(8)),
}  # fmt: skip


COUNTED_IN_CI = ("unseeded", "twice", "unknown length", "cached")


@contextlib.contextmanager
def shuffle_of_tensorflow(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as original:
        original.setattr(tf.data.Dataset, "shuffle", tensorflow_shuffle.PATCH.symbols[0].get())
        yield


def pipeline_of_tensorflow(kind: str, patch: pytest.MonkeyPatch) -> Any:
    with shuffle_of_tensorflow(patch):
        tf.random.set_seed(4)
        return PIPELINES[kind]()


def orders_of_tensorflow(kind: str, passes: int, patch: pytest.MonkeyPatch) -> list[Any]:
    pipeline = pipeline_of_tensorflow(kind, patch)
    return [read(pipeline) for _ in range(passes)]


def read(pipeline: Any) -> list[Any]:
    return [element.to_list() if isinstance(element, tf.RaggedTensor) else element.numpy().tolist()
            for element in pipeline]  # fmt: skip


@pytest.mark.parametrize("kind", PIPELINES)
def test_orders_are_those_of_tensorflow_in_any_order_of_the_passes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = orders_of_tensorflow(kind, 4, monkeypatch)
    tensorflow_shuffle.count_iterations()
    tf.random.set_seed(4)
    pipeline = PIPELINES[kind]()
    assert int(pipeline.cardinality()) == int(PIPELINES[kind]().cardinality())
    shuffles = tensorflow_shuffle.shuffles_of(pipeline, epoch_steps=1)
    passes = [0, 0, 1] if kind == "cached" else [3, 0, 2, 2, 1]
    assert [read(shuffles.in_pass(pipeline, number)) for number in passes] == [expected[number] for number in passes]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in COUNTED_IN_CI else pytest.mark.slow) for kind in PIPELINES]
)
def test_passes_count_the_iterators_that_fit_does_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of_tensorflow(kind, monkeypatch)
    expected = []
    for _ in range(4):
        expected.append(read(pipeline))
        if kind != "unknown length":
            iter(pipeline)
    tensorflow_shuffle.count_iterations()
    tf.random.set_seed(4)
    pipeline = PIPELINES[kind]()
    shuffles = tensorflow_shuffle.shuffles_of(pipeline)
    passes = [0, 1, 2, 3] if kind == "cached" else [3, 0, 2, 1]
    assert [read(shuffles.in_pass(pipeline, number)) for number in passes] == [expected[number] for number in passes]


def test_iterations_go_on_as_in_tensorflow_where_nobody_names_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = orders_of_tensorflow("unseeded", 3, monkeypatch)
    tensorflow_shuffle.count_iterations()
    tf.random.set_seed(4)
    pipeline = PIPELINES["unseeded"]()
    assert [read(pipeline) for _ in range(3)] == expected


@pytest.mark.parametrize("batched", [True, False])
def test_a_source_begins_with_any_pass(batched: bool) -> None:
    tensorflow_shuffle.count_iterations()
    tf.random.set_seed(0)
    pipeline = numbers().shuffle(ROWS).batch(5) if batched else numbers().shuffle(ROWS)
    config = Data(function="unused:unused", args={}, global_batch=5, batched=batched, shuffle=False)
    split = make_split(pipeline, config, seed=0, training=True)

    def rows(first_pass: int, batches: int) -> list[list[int]]:
        source = split.training_source(first_pass, 0, ends_visible=False)
        return [source.load(element).numpy().tolist() for element in source.elements.take(batches)]

    whole = rows(0, 15)
    assert rows(0, 15) == whole
    assert rows(1, 10) == whole[5:]
    assert rows(2, 5) == whole[10:]
    assert whole[:5] != whole[5:10]


# whole runs

X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
Y = (X @ np.array([1.0, -2.0, 0.5]) + np.random.default_rng(1).normal(size=48)).astype("float32")[:, None]


def model() -> keras.Model:
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    made = keras.Sequential([keras.layers.Input((3,)), dense])
    made.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return made


def data(kind: str = "known length") -> dict[str, Any]:
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(48, seed=5)
    if kind == "shared":
        return {"train": shuffled.skip(8).batch(8), "validation": shuffled.take(8).batch(8)}
    if kind == "unknown length":
        return {"train": shuffled.filter(lambda x, y: x[0] > -1).shuffle(5, seed=1).batch(8)}
    if kind == "endless":
        return {"train": shuffled.batch(8).repeat()}
    return {"train": shuffled.batch(8)}


def trained(
    folder: Path, *epochs: int, strategy: dict[str, Any], steps: int | None = None, **args: Any
) -> tuple[list[float], list[str]]:
    """Return the loss of each epoch, in one attempt after the other, and what the run said."""
    configs = [
        {
            "model": {"function": f"{HERE}:model"},
            "data": {"function": f"{HERE}:data", "args": args, "global_batch": 8, "batched": True},
            "train": {"epochs": number, "steps_per_epoch": steps},
            "strategy": strategy,
        }
        for number in epochs
    ]
    return losses_and_notices(folder, configs)


@pytest.mark.parametrize(
    ("strategy", "kind", "steps"),
    [
        ({"kind": "one_device"}, "known length", None),
        ({"kind": "one_device"}, "unknown length", None),
        ({"kind": "one_device"}, "endless", 4),
        pytest.param({"kind": "mirrored", "replicas": 3}, "known length", None, marks=pytest.mark.slow),
    ],
    ids=["one device", "unknown length", "steps", "replicas"],
)
def test_a_resumed_run_has_the_losses_of_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any], kind: str, steps: int | None
) -> None:
    keras.utils.set_random_seed(0)
    with shuffle_of_tensorflow(monkeypatch):
        split = data(kind)["train"]
    expected = model().fit(split, epochs=4, steps_per_epoch=steps, verbose=0).history["loss"]
    losses, _ = trained(tmp_path, 1, 2, 4, strategy=strategy, kind=kind, steps=steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_splits_of_one_shuffle_are_named(tmp_path: Path) -> None:
    _, said = trained(tmp_path, 1, strategy={"kind": "one_device"}, kind="shared")
    (found,) = [each for each in said if "shuffle" in each]
    assert "reshuffle_each_iteration=False" in found
    assert not [each for each in trained(tmp_path / "b", 1, strategy={"kind": "one_device"})[1] if "shuffle" in each]
