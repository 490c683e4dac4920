"""Variables with copies, and variables on a mesh, as plain numbers: callbacks read the learning rate so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

from distlaunch.config.strategies.replicas import MirroredSection
from distlaunch.strategies.replica.mirrored import Mirrored


@pytest.mark.parametrize(
    ("number", "dtype", "aggregation"),
    [
        (0.25, "float32", "mean"),
        (0.25, "float32", "only_first_replica"),
        (7, "int64", "only_first_replica"),
        (7, "int32", "sum"),
        (-1.5, "float16", "none"),
    ],
)
@pytest.mark.usefixtures("virtual_devices")
def test_copies_on_replicas(number: float, dtype: str, aggregation: str) -> None:
    with Mirrored(MirroredSection(kind="mirrored", replicas=2)).scope():
        variable = keras.Variable(number, dtype=dtype, trainable=False, aggregation=aggregation)
    assert (float(variable), int(variable), complex(variable.value)) == (number, int(number), number)
    variable.assign(number * 2)
    assert float(variable) == number * 2
    assert f"{float(variable):.1f}" == f"{number * 2:.1f}"


@pytest.mark.usefixtures("virtual_devices")
def test_more_than_one_number_is_none() -> None:
    with Mirrored(MirroredSection(kind="mirrored", replicas=2)).scope():
        variable = keras.Variable([1.0, 2.0])
    with pytest.raises(TypeError, match="Only scalar arrays"):
        float(variable)


@pytest.mark.usefixtures("virtual_devices")
def test_a_variable_on_a_mesh() -> None:
    from tensorflow.experimental import dtensor

    from distlaunch.strategies.dtensor.variable import MeshVariable

    mesh: Any = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])
    variable = MeshVariable(np.float32(0.25), mesh, ())
    assert (float(variable), int(variable), complex(variable)) == (0.25, 0, 0.25)
    variable.assign(tf.constant(0.5))
    assert float(variable) == 0.5
