"""`data.map` changes every split; `data.augment` changes what training reads, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.config.run import Data, RunConfig
from distlaunch.config.strategies.replicas import MirroredSection

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from distlaunch.base.run_dir import RunDir  # noqa: E402
from distlaunch.checkpoints.meta import Progress  # noqa: E402
from distlaunch.checkpoints.store import CheckpointStore  # noqa: E402
from distlaunch.data.random_ops import random_warnings  # noqa: E402
from distlaunch.data.source import make_split, open_splits  # noqa: E402
from distlaunch.data.splits import StreamData  # noqa: E402
from distlaunch.strategies.parameter_server import worker_batches  # noqa: E402
from distlaunch.strategies.parameter_server.numbered_batches import offer_splits  # noqa: E402
from distlaunch.strategies.replica.mirrored import Mirrored  # noqa: E402
from distlaunch.strategies.replica.one_device import OneDevice  # noqa: E402
from distlaunch.training.build import build_model  # noqa: E402
from distlaunch.training.loop import LoopHooks, TrainingLoop  # noqa: E402
from distlaunch.training.steps.functions import make_steps  # noqa: E402

pytestmark = pytest.mark.usefixtures("virtual_devices")
ROWS, BATCH = 22, 4
NUMBERS = np.arange(ROWS, dtype=np.float32)
NAMES = {"map": f"{__name__}:tenfold", "augment": f"{__name__}:drawn"}


def tenfold(x: Any, y: Any) -> Any:
    return 10 * x, y


def drawn(x: Any, y: Any, seed: Any) -> Any:
    return x + tf.random.stateless_uniform(tf.shape(x), seed, 1.0, 9.0), -y


def added(x: Any, y: Any) -> Any:
    return x + 1, -y


class Items:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return NUMBERS[index], NUMBERS[index]


def pipeline(part: slice = slice(None)) -> Any:
    return tf.data.Dataset.from_tensor_slices((NUMBERS[part], NUMBERS[part]))


TIERS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (NUMBERS, NUMBERS),
    "examples by number": Items,
    "pipeline": pipeline,
    "pipeline of unknown length": lambda: pipeline().filter(lambda x, y: True),
    "streams": lambda: StreamData({at: pipeline(slice(at, None, 2)) for at in range(2)}, 2),
}


def config(**keys: Any) -> Data:
    return Data(function="unused:unused", args={}, **{"global_batch": BATCH, **NAMES, **keys})


def read(source: Any, batches: int | None = None) -> list[tuple[float, ...]]:
    """Rows as (x, y) or (x, y, weight), of so many batches or up to the first without rows."""
    rows: list[tuple[float, ...]] = []
    for number, element in enumerate(source.elements):
        loaded = [part.numpy().tolist() for part in source.load(element)]
        if number == batches or not loaded[0]:
            return rows
        rows += zip(*loaded, strict=True)
    return rows


DEAR = ("pipeline of unknown length", "streams")


@pytest.mark.parametrize("tier", [pytest.param(tier, marks=[pytest.mark.slow] * (tier in DEAR)) for tier in TIERS])
def test_only_training_is_augmented(tier: str) -> None:
    """After `map`, by the same draw for the same epoch and example, also where a resumed run begins."""
    split = make_split(TIERS[tier](), config(class_weight={0: 2.0}), seed=3, training=True)
    visible = split.num_batches is None
    trained = read(split.training_source(0, 0, ends_visible=visible), 6)
    assert sorted(-y for _, y, _ in trained) == NUMBERS.tolist()
    assert all(10 * -y + 1 <= x < 10 * -y + 9 for x, y, _ in trained)
    resumed = split.training_source(0, 0 if visible else 2, ends_visible=visible, skip=2 if visible else 0)
    assert read(resumed, 4) == trained[2 * BATCH :]
    plain = [(10 * x, x) for x in NUMBERS.tolist()]
    assert sorted(read(split.in_order().evaluation_source())) == plain
    assert {*zip(*(part.numpy().tolist() for part in split.first_rows(3)[:2]), strict=True)} <= {*plain}
    validation = make_split(TIERS[tier](), config(), seed=3, training=False)
    assert sorted(read(validation.evaluation_source())) == plain
    assert validation.work.endswith("map")
    assert split.work.endswith("map and augment")


@pytest.mark.parametrize("tier", ["arrays", "examples by number", "pipeline"])
def test_an_evaluation_of_training_data_counts_every_example(tier: str) -> None:
    """Also the last batch, and those after an example that training would skip."""
    keys = {"remainder": "drop", "train_examples": 19, "map": None, "shuffle": 5}
    split = make_split(TIERS[tier](), config(**keys), seed=0, training=True)
    assert read(split.in_order().evaluation_source()) == [(x, x) for x in NUMBERS.tolist()[:19]]
    assert (split.num_batches, split.in_order().num_batches) == (4, 5)


def test_workers_of_parameter_servers_read_the_same(tmp_path: Path) -> None:
    raw = {"model": {"function": "m:f"}, "data": {"function": f"{__name__}:given", "global_batch": BATCH, **NAMES,
           "class_weight": {0: 2.0}, "remainder": "drop"},
           "strategy": {"kind": "parameter_server"}, "cluster": {"ps": 1}}  # fmt: skip
    run_config = RunConfig.model_validate(raw)
    splits, train, validation = open_splits(run_config, RunDir(tmp_path))
    offer_splits(run_config, splits, train, validation)

    def rows(name: str, batches: int) -> list[Any]:
        offered = worker_batches.offered_split(name)
        loaded = [offered.read(0, number) for number in range(batches)]
        return [row for batch in loaded for row in zip(*(part.numpy().tolist() for part in batch), strict=True)]

    plain = [(10 * x, x) for x in NUMBERS.tolist()]
    assert rows("train:once", 6) == rows("validation:once", 6) == plain
    assert rows("train", 5) == read(train.training_source(0, 0, ends_visible=False), 5)
    assert all(y <= 0 for _, y, _ in rows("train", 5))


def given() -> Any:
    return {"train": (NUMBERS, NUMBERS), "validation": (NUMBERS, NUMBERS)}


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **by_name: Any) -> Any:
        return function(*args, **by_name)

    return called


hidden = decorated(drawn)


@pytest.mark.parametrize("training", [True, False])
def test_a_map_with_a_seed_is_refused_where_only_python_sees_it(*, training: bool) -> None:
    name = f"{__name__}:hidden"
    with pytest.raises(ConfigError, match="use `augment:` for random changes"):
        make_split((NUMBERS, NUMBERS), config(map=name, augment=None), seed=0, training=training)


def test_an_augmentation_may_do_without_a_seed() -> None:
    split = make_split((NUMBERS, NUMBERS), config(map=None, augment=f"{__name__}:added", shuffle=False), seed=0,
                       training=True)  # fmt: skip
    assert read(split.training_source(0, 0, ends_visible=False), 1) == [(x + 1, -x) for x in range(4)]


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_training_is_that_of_fit_on_augmented_data(replicas: int) -> None:
    """Losses, validation and weights; Keras gets what `augment` makes of each epoch's examples."""
    x = np.random.default_rng(1).normal(size=(ROWS, 5)).astype("float32")
    y = x.sum(1, keepdims=True)

    def model(config: RunConfig, strategy: Any, rows: Any) -> Any:
        keras.utils.set_random_seed(0)
        return build_model(config, strategy, rows)

    raw = {"model": {"function": f"{__name__}:regressor"}, "train": {"epochs": 3}, "data": {
        "function": "m:f", "global_batch": BATCH, "shuffle": False, "augment": f"{__name__}:noisy"}}  # fmt: skip
    config = RunConfig.model_validate(raw)
    train = make_split((x, y), config.data, seed=0, training=True)
    validation = make_split((x, y), config.data, seed=0, training=False)
    strategy = OneDevice() if replicas == 1 else Mirrored(MirroredSection(kind="mirrored", replicas=replicas))
    ours = model(config, strategy, train.first_rows(2))
    hooks = LoopHooks(lambda event: None, lambda: False, store=CheckpointStore(Path("unused")), is_chief=False)
    program = strategy.program(make_steps(config, ours))
    TrainingLoop(config, ours, program, train, validation, [], hooks).run(Progress())

    theirs = model(config, OneDevice(), train.first_rows(2))
    logs = []
    for epoch in range(3):
        seeds = [tf.constant([epoch, at], tf.int64) for at in range(ROWS)]
        rows = np.stack([noisy(row, 0, seed)[0].numpy() for row, seed in zip(x, seeds, strict=True)])
        fitted = theirs.fit(rows, y, batch_size=BATCH, shuffle=False, validation_data=(x, y), verbose=0)
        logs.append({name: values[0] for name, values in fitted.history.items()})
    for name in ("loss", "val_loss"):
        assert ours.history.history[name] == pytest.approx([each[name] for each in logs], rel=1e-5)
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def noisy(x: Any, y: Any, seed: Any) -> Any:
    return x + tf.random.stateless_normal([5], seed), y


def regressor() -> Any:
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def one_part(x: Any, y: Any) -> Any:
    return x


def more_dimensions(x: Any, y: Any, seed: Any) -> Any:
    return tf.stack([x, x]), y


@pytest.mark.parametrize("tier", TIERS)
def test_what_does_not_fit_is_named_before_training(tier: str) -> None:
    def first_rows(name: str) -> None:
        keys = config(map=None, augment=f"{__name__}:{name}")
        make_split(TIERS[tier](), keys, seed=0, training=True).first_rows(2)

    with pytest.raises(ConfigError, match=r"data.augment: it is called with \(x, y\), which alone\(x\) does not take"):
        first_rows("alone")
    with pytest.raises(
        ConfigError, match=r"data.augment: it turns examples of the form .* into examples of the form 0 dimensions"
    ):
        first_rows("one_part")
    with pytest.raises(ConfigError, match=r"into examples of the form \(1 dimension, 0 dimensions\)"):
        first_rows("more_dimensions")


def alone(x: Any) -> Any:
    return x


def unseeded(x: Any, y: Any) -> Any:
    return x + tf.random.uniform([]), y


@pytest.mark.parametrize("tier", ["arrays", "examples by number", "pipeline", "streams"])
def test_draws_without_a_seed_are_named(tier: str) -> None:
    def told(**keys: Any) -> list[str]:
        given = config(**{"map": None, "augment": None, **keys})
        return random_warnings(given, make_split(TIERS[tier](), given, seed=0, training=True), None)

    name = f"{__name__}:unseeded"
    assert told() == told(**NAMES) == []
    [message] = told(map=name, augment=NAMES["augment"])
    assert message.startswith(f"data.map: {name} draws random numbers (RandomUniform), also in validation")
    [message] = told(map=NAMES["map"], augment=name)
    assert message.startswith(f"data.augment: {name} draws random numbers (RandomUniform) that cannot be reproduced")
