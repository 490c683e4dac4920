"""Statistics of layers on replicas change neither by a validation nor by stand-in rows; float8 scales are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from distlaunch.base.errors import ConfigError
from distlaunch.patches.tensorflow_collectives import mirrored_strategy
from distlaunch.strategies.replica.program import Statistics
from tests.corpus.models import compiled, table
from tests.parity.test_custom_on_replicas import TWO, train

pytestmark = pytest.mark.usefixtures("virtual_devices")
HERE = "tests.parity.test_replica_statistics"


def renormalized() -> keras.Model:
    norm = layers.BatchNormalization(renorm=True, momentum=0.5, renorm_momentum=0.5)
    return compiled(keras.Sequential([layers.Input((6,)), layers.Dense(4), norm, layers.Dense(1)]))


def data() -> dict[str, Any]:
    return {name: (x[:22], y[:22]) for name, (x, y) in table().items()}


def train_only() -> dict[str, Any]:
    return {"train": data()["train"]}


def short_last_batch() -> dict[str, Any]:
    """A second batch of one row, which the second replica gets; the first one gets a stand-in."""
    x, y = table()["train"]
    return {"train": (x[:17], y[:17])}


def one_batch() -> dict[str, Any]:
    x, y = table()["train"]
    return {"train": (x[:16], y[:16])}


def test_a_validation_does_not_change_training(tmp_path: Path) -> None:
    with_validation = train(tmp_path / "both", TWO, f"{HERE}:renormalized", data=f"{HERE}:data", loop="fit", epochs=3)
    without = train(tmp_path / "one", TWO, f"{HERE}:renormalized", data=f"{HERE}:train_only", loop="fit", epochs=3)
    for one, other in zip(with_validation.weights, without.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stand_in_row_does_not_change_statistics(tmp_path: Path) -> None:
    found = [
        train(tmp_path / name, TWO, f"{HERE}:renormalized", data=f"{HERE}:{name}", loop="fit").weights
        for name in ("one_batch", "short_last_batch")
    ]
    names = [variable.path for variable in renormalized().weights]
    statistics = [at for at, name in enumerate(names) if "moving" in name or "renorm" in name]
    assert len(statistics) == 5
    for at, (one, other) in enumerate(zip(*found, strict=True)):
        assert np.array_equal(one, other) is (at in statistics), names[at]


def test_what_a_validation_changes_stays() -> None:
    strategy = mirrored_strategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = renormalized()
    changed, kept = model.layers[1].moving_mean, model.layers[1].moving_variance

    def set_own() -> None:
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        for variable in (changed, kept):
            variable.assign(tf.fill(variable.shape, number + 1))

    def values(variable: Any) -> list[float]:
        return [float(one[0]) for one in strategy.experimental_local_results(strategy.run(lambda: variable.value + 0))]

    strategy.run(tf.function(set_own))
    with Statistics(strategy, model).of_first_replica():
        assert values(changed) == values(kept) == [1, 1]
        strategy.run(tf.function(lambda: changed.assign(changed.value + 1)))
    assert (values(changed), values(kept)) == ([2, 2], [1, 2])


def with_float8() -> keras.Model:
    model = keras.Sequential([layers.Input((6,)), layers.Dense(4, name="small"), layers.Dense(1)])
    model.layers[0].quantize("float8")
    return compiled(model)


def test_float8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the layer '.*small' trains with float8 \(float8_from_float32\)"):
        train(tmp_path, TWO, f"{HERE}:with_float8", data=f"{HERE}:train_only", loop="fit")
