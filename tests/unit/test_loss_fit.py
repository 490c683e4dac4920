"""Inputs of losses are checked before the first step: certain mistakes are errors, and possible ones are warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.config.run import Data
from distlaunch.data.source import Split, make_split
from distlaunch.strategies.parameter_server.worker_batches import OfferedSplit, fetch, offer
from distlaunch.training.checks.labels import explain_label_errors, label_rules, with_label_checks
from distlaunch.training.checks.loss_fit import check_loss

pytestmark = pytest.mark.usefixtures("virtual_devices")

ROWS = 3
NUMBERS, ONE_HOT, COLUMN = np.array([0, 3, 1]), np.eye(4, dtype="float32")[:ROWS], np.array([[0], [3], [1]])
YES_NO = np.array([[0.0], [1.0], [1.0]])
SPARSE, BINARY = keras.losses.SparseCategoricalCrossentropy, keras.losses.BinaryCrossentropy
layers = keras.layers


def model(*last: Any, loss: Any) -> keras.Model:
    made = keras.Sequential([layers.Input((5,)), *last])
    made.compile(loss=loss)
    return made


def functional(loss: Any) -> keras.Model:
    x = layers.Input((5,))
    made = keras.Model(x, layers.Reshape((4,))(layers.Dense(4, name="logits")(x)))
    made.compile(loss=loss)
    return made


def dense(units: int = 4, activation: str | None = None, **options: Any) -> Any:
    return layers.Dense(units, activation, **options)


def check(made: keras.Model, y: Any) -> list[str]:
    """Check a loss, and return the warnings."""
    found: list[str] = []
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    check_loss(made, y, made(x), ("compile", "loss"), found.append)
    return found


@pytest.mark.parametrize(
    ("make", "y", "told"),
    [
        (lambda: model(dense(), loss="sparse_categorical_crossentropy"), NUMBERS, "has no activation.*softmax"),
        (lambda: model(dense(kernel_initializer="zeros"), loss=SPARSE()), NUMBERS, "has no activation"),
        (lambda: functional(SPARSE()), NUMBERS, "'logits', has no activation"),
        (lambda: model(dense(), layers.Dropout(0.1), loss="categorical_crossentropy"), ONE_HOT, "has no activation"),
        (lambda: model(dense(1), loss="binary_crossentropy"), YES_NO, "has no activation.*sigmoid"),
        (lambda: model(dense(), layers.Activation("linear"), loss=SPARSE()), NUMBERS, "has no activation"),
        (lambda: model(dense(), layers.Lambda(lambda x: x * 9), loss=SPARSE()), NUMBERS, "outputs go from -.* to"),
        (
            lambda: model(dense(4, "softmax"), loss="categorical_crossentropy"),
            NUMBERS,
            r"one-hot.*\[rows\].*\[rows, 4\].*sparse",
        ),
        (lambda: model(dense(4, "softmax"), loss="categorical_crossentropy"), COLUMN, r"one-hot.*\[rows, 1\]"),
        (lambda: model(dense(4, "softmax"), loss="categorical_crossentropy"), ONE_HOT[:, :3], r"\[rows, 3\]"),
        (lambda: model(dense(1, "sigmoid"), loss="categorical_crossentropy"), YES_NO, "always 0"),
        (lambda: model(dense(4, "softmax"), loss=SPARSE()), ONE_HOT, "class numbers.*one-hot.*use categorical"),
        (lambda: model(dense(4, "sigmoid"), loss="binary_crossentropy"), NUMBERS, r"label for each output.*\[rows\]"),
        (lambda: model(dense(), loss="mse"), NUMBERS, r"same shape.*\[rows\].*\[rows, 4\]"),
    ],
)
def test_what_must_be_wrong(make: Callable[[], keras.Model], y: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        check(make(), y)
    assert caught.value.problems[0].dotted == "compile.loss"


@pytest.mark.parametrize(
    ("make", "y"),
    [
        (lambda: model(dense(4, "softmax"), loss="sparse_categorical_crossentropy"), NUMBERS),
        (lambda: model(dense(4, "softmax"), loss=SPARSE()), COLUMN),
        (lambda: model(dense(), loss=SPARSE(from_logits=True)), NUMBERS),
        (lambda: model(dense(), layers.Softmax(), loss=SPARSE()), NUMBERS),
        (lambda: model(dense(kernel_initializer="zeros"), loss=SPARSE(from_logits=True)), NUMBERS),
        (lambda: model(dense(), layers.Lambda(keras.ops.exp), loss="categorical_crossentropy"), ONE_HOT),
        (lambda: model(dense(1, "sigmoid"), loss=BINARY()), YES_NO[:, 0]),
        (lambda: model(dense(1), loss=BINARY(from_logits=True)), YES_NO),
        (lambda: model(dense(1), loss="mse"), NUMBERS),
        (lambda: model(dense(4), loss=lambda y, p: keras.ops.mean(p)), NUMBERS),
        (lambda: model(dense(4), loss=None), NUMBERS),
    ],
)
def test_what_may_be_right(make: Callable[[], keras.Model], y: Any) -> None:
    assert check(make(), y) == []


@pytest.mark.parametrize(
    ("make", "y", "told"),
    [
        (
            lambda: model(dense(4, "softmax"), loss=SPARSE(from_logits=True)),
            NUMBERS,
            "computes probabilities (softmax)",
        ),
        (
            lambda: model(dense(), layers.Softmax(name="last"), loss=SPARSE(from_logits=True)),
            NUMBERS,
            "sparse_categorical_crossentropy with from_logits=true takes logits, but the last layer, 'last', computes "
            "probabilities (softmax); write {from_logits: false}",
        ),
        (
            lambda: model(dense(1), layers.Activation("sigmoid"), loss=BINARY(from_logits=True)),
            YES_NO,
            "computes probabilities (sigmoid)",
        ),
        (
            lambda: model(dense(), layers.Lambda(keras.ops.softmax), loss=SPARSE(from_logits=True)),
            NUMBERS,
            "the model's outputs are probabilities, which add up to 1",
        ),
        (lambda: model(dense(1, "sigmoid"), loss="binary_crossentropy"), YES_NO * 2 - 1, "labels from 0 to 1"),
    ],
)
def test_what_may_be_wrong(make: Callable[[], keras.Model], y: Any, told: str) -> None:
    [warning] = check(make(), y)
    assert told in warning


def two_outputs(loss: Any) -> keras.Model:
    x = layers.Input((5,))
    made = keras.Model(x, {"kind": layers.Dense(4, name="kind")(x), "size": layers.Dense(1, name="size")(x)})
    made.compile(loss=loss)
    return made


def test_each_output_has_its_loss() -> None:
    y = {"size": YES_NO, "kind": NUMBERS}
    assert check(two_outputs({"kind": SPARSE(from_logits=True), "size": "mse"}), y) == []
    with pytest.raises(ConfigError, match=r"output 'kind': .*probabilities"):
        check(two_outputs({"kind": SPARSE(), "size": "mse"}), y)


def rules_of(loss: Any) -> list:
    made = model(dense(), loss=loss)
    return label_rules(made, NUMBERS, made(np.zeros((ROWS, 5), "float32")))


def split(labels: np.ndarray, *, arrays: bool) -> Split:
    data = np.zeros((len(labels), 5), "float32"), labels
    config = Data.model_validate({"function": "unused:unused", "global_batch": 2, "shuffle": False})
    given = data if arrays else tf.data.Dataset.from_tensor_slices(data)
    return make_split(given, config, seed=0, training=True)


BAD = [
    (np.array([0, 1, 2, 3, 3, 4]), 4, {}),
    (np.array([0, 1, -1, 3], "float32"), -1, {}),
    (np.array([[0], [1], [9], [255]]), 9, {"ignore_class": 255}),
]


@pytest.mark.parametrize(("labels", "bad", "options"), BAD)
def test_labels_in_arrays_are_looked_at_first(labels: np.ndarray, bad: float, options: dict) -> None:
    rules, row = rules_of(SPARSE(from_logits=True, **options)), int(np.argwhere(labels == bad)[0][0])
    with pytest.raises(ConfigError, match=rf"label {bad}\S* in row {row} of the training data.*from 0 to 3"):
        with_label_checks(split(labels, arrays=True), rules)
    good = split(np.where(labels == bad, 3, labels), arrays=True)
    assert with_label_checks(good, rules) is good


@pytest.mark.parametrize(("labels", "bad", "options"), BAD)
def test_labels_of_pipelines_are_looked_at_as_they_come(labels: np.ndarray, bad: float, options: dict) -> None:
    rules = rules_of(SPARSE(from_logits=True, **options))
    checked = with_label_checks(split(labels, arrays=False), rules)
    zero, batches = tf.constant(0, tf.int64), []
    with pytest.raises(DataError, match=rf"label {bad}\S* in a batch, but .* from 0 to 3"), explain_label_errors():
        batches.extend(checked.batches(zero, zero).map(lambda *rows: checked.load(rows)))
    assert len(batches) == int(np.argwhere(labels == bad)[0][0]) // 2
    good = with_label_checks(split(np.where(labels == bad, 3, labels), arrays=False), rules)
    assert len(list(good.batches(zero, zero).map(lambda *rows: good.load(rows)))) == -(-len(labels) // 2)


@pytest.mark.parametrize(
    ("kind", "classes", "options"),
    [("uint8", 256, {}), ("int8", 200, {}), ("bool", 2, {}), ("uint8", 300, {"ignore_class": -1})],
)
def test_labels_may_have_a_type_that_does_not_hold_the_number_of_classes(
    kind: str, classes: int, options: dict
) -> None:
    labels = np.array([0, 1, 1, 0]).astype(kind)
    made = model(keras.layers.Dense(classes), loss=SPARSE(from_logits=True, **options))
    rules = label_rules(made, labels, made(np.zeros((4, 5), "float32")))
    for arrays in (False, True):
        good, zero = with_label_checks(split(labels, arrays=arrays), rules), tf.constant(0, tf.int64)
        found = [good.load(rows)[1] for rows in good.batches(zero, zero)]
        assert np.concatenate(found).tolist() == labels.tolist()


def test_labels_that_another_process_has_read_are_looked_at_in_the_graph() -> None:
    checked = with_label_checks(split(NUMBERS, arrays=False), rules_of(SPARSE(from_logits=True))).evaluation_source()
    labels = [NUMBERS, NUMBERS + 1]
    answer = lambda worker, number: (np.zeros((ROWS, 5), "float32"), labels[number])  # noqa: E731
    offer(checked.name, OfferedSplit(answer, checked.num_batches, lambda: "{}"))
    spec = (tf.TensorSpec([None, 5], tf.float32), tf.TensorSpec([None], tf.int64))

    @tf.function
    def graph(number: Any) -> Any:
        (_, y), _ = fetch(checked, tf.constant(0, tf.int64), number, spec)
        # as TensorFlow's own loss, which would tell less
        tf.debugging.Assert(tf.reduce_all(y < 4), ["outside the valid range"])
        return y

    assert graph(tf.constant(0, tf.int64)).numpy().tolist() == NUMBERS.tolist()
    with pytest.raises(DataError, match=r"label 4 in a batch, but .* from 0 to 3"), explain_label_errors():
        graph(tf.constant(1, tf.int64))


def test_labels_are_not_numbers_of_classes_for_other_losses() -> None:
    assert rules_of("mse") == []
    assert rules_of(lambda y, p: keras.ops.mean(p)) == []
