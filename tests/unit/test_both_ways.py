"""The user's functions run converted in graphs, even in a dataset within another one, and unconverted when eager."""

from __future__ import annotations

import functools
import inspect

import pytest
import tensorflow as tf

from distlaunch.data.user_functions import with_autograph_in_graphs

pytestmark = pytest.mark.usefixtures("virtual_devices")


def add(x: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(x) > 1:
        x += 1
    return x


def test_a_branch_in_a_map_of_a_dataset_within_another() -> None:
    function = with_autograph_in_graphs(add)
    passes = tf.data.Dataset.range(2).flat_map(lambda n: tf.data.Dataset.range(3).map(lambda x: function(x)))
    assert list(passes.as_numpy_iterator()) == [0, 1, 3] * 2


def test_eagerly_it_is_the_users_own_code() -> None:
    codes = []

    def seen(x: tf.Tensor) -> tf.Tensor:
        codes.append(inspect.currentframe().f_code)
        return x

    with_autograph_in_graphs(seen)(tf.constant(1))
    assert codes == [seen.__code__]


def test_what_has_no_source_stays() -> None:
    for function in (abs, functools.partial(add), tf.keras.layers.Dense(1), eval("lambda x: x")):
        assert with_autograph_in_graphs(function) is function
