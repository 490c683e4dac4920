"""Checks that labels are within the range of the model's outputs, with an error on every backend.

TensorFlow itself raises an error on CPU only, and JAX never does. Labels in arrays are checked before the first step.
Labels from a pipeline are checked in the input pipeline, before a step uses them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, DataError, Problem
from distlaunch.data.batches import Batch
from distlaunch.data.split import Split
from distlaunch.patches.tensorflow_late import is_a, tf
from distlaunch.training.checks.loss_fit import SPARSE, LabelPlace, loss_inputs

_MARK = "distlaunch: label outside"  # identifies this check's failure in TensorFlow's text
_FOUND = re.compile(rf"\[{_MARK} (.*?)\] \[(\S+?)\]")


@dataclass(frozen=True)
class LabelRule:
    """Class numbers that one loss accepts: 0 to `num_classes` - 1, and `ignored`.

    Attributes:
        place: position in the structure of the labels.
        text: the rule in words.
    """

    place: LabelPlace
    num_classes: int
    ignored: int | None
    text: str


def label_rules(model: keras.Model, y: Any, predictions: Any) -> list[LabelRule]:
    """Return the label rules of a compiled model.

    Args:
        y: labels of some rows.
        predictions: predictions for the same rows.
    """
    rules = []
    for inputs in loss_inputs(model, y, predictions):
        if inputs.loss.kind == SPARSE:
            number, ignored = inputs.num_classes, inputs.loss.ignore_class
            where = f" of output '{inputs.output}'" if inputs.output else ""
            besides = "" if ignored is None else f", and {ignored} for ignored labels"
            text = (
                f"{inputs.loss.name}{where} takes class numbers from 0 to {number - 1}{besides}, since the model has "
            )
            rules.append(LabelRule(inputs.place, number, ignored, f"{text}{number} output{'s' * (number != 1)}"))
    return rules


def check_arrays(labels: Any, rules: Sequence[LabelRule], split: str) -> None:
    """Check all labels of a split.

    Raises:
        ConfigError: a label violates a rule.
    """
    problems = []
    for rule in rules:
        values = np.asarray(rule.place.of(labels))
        # floats can hold class numbers too, but 1.5 is not one
        good = (values >= 0) & (values < rule.num_classes) & (values == np.floor(values))
        good |= False if rule.ignored is None else values == rule.ignored
        if not good.all():
            where = tuple(int(index) for index in np.argwhere(~good)[0])
            problems.append(
                Problem(("data",), _message(values[where], f"in row {where[0]} of the {split} data", rule.text))
            )
    if problems:
        raise ConfigError(problems)


def with_label_checks(split: Split, rules: Sequence[LabelRule]) -> Split:
    """Return the split with a check that stops training at a wrong label; see `explain_label_errors`.

    Raises:
        ConfigError: a label in an array violates a rule.
    """
    if not rules:
        return split
    if split.labels is None:
        check = _check_batch if split.on_host else _assert_labels
        return split.with_check(functools.partial(check, rules))
    check_arrays(split.labels, rules, "training" if split.name == "train" else split.name)
    return split


def _check_batch(rules: Sequence[LabelRule], batch: Batch) -> Batch:
    """Return a batch of arrays.

    Raises:
        DataError: a label violates a rule.
    """
    labels = keras.utils.unpack_x_y_sample_weight(batch)[1]
    for rule in rules:
        values = np.asarray(rule.place.of(labels))
        good = (values >= 0) & (values < rule.num_classes)
        good |= False if rule.ignored is None else values == rule.ignored
        if not good.all():
            raise DataError(f"data: {_message(values[~good].flat[0], 'in a batch', rule.text)}")
    return batch


def _assert_labels(rules: Sequence[LabelRule], batch: Batch) -> Batch:
    """Return the batch, with assertions that run in a graph before anything else reads a label."""
    labels = keras.utils.unpack_x_y_sample_weight(batch)[1]
    # strings, as in the error message, cannot be on a GPU
    with tf.device("CPU:0"):
        checks = [_assert_within(rule.place.of(labels), rule) for rule in rules]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.nest.map_structure(_identity, batch, expand_composites=True)


def _identity(part: Any) -> Any:
    return None if part is None else tf.identity(part)


def _assert_within(labels: Any, rule: LabelRule) -> Any:
    values = labels.flat_values if isinstance(labels, tf.RaggedTensor) else labels
    if not values.dtype.is_floating:
        values = tf.cast(values, tf.int64)  # small types cannot hold the number of classes, or a negative label
    good = (values >= 0) & (values < tf.cast(rule.num_classes, values.dtype))
    if rule.ignored is not None:
        good |= values == tf.cast(rule.ignored, values.dtype)
    # the message shows one wrong label, of which there may be thousands
    first = tf.boolean_mask(values, ~good)[:1]
    return tf.debugging.Assert(tf.reduce_all(good), [f"{_MARK} {rule.text}", tf.strings.as_string(first)], summarize=1)


@contextlib.contextmanager
def explain_label_errors() -> Iterator[None]:
    """Raise a DataError instead of the pipeline's error if a wrong label has stopped the pipeline."""
    try:
        yield
    except Exception as error:
        if not is_a(error, "errors.InvalidArgumentError"):
            raise
        # `tf.debugging.Assert` prints each value in brackets, on its own line
        found = _FOUND.search(str(error).replace("\n", " "))
        if found is None:
            raise
        raise DataError(f"data: {_message(found[2].strip(chr(39) + chr(34)), 'in a batch', found[1])}") from None


def _message(label: Any, where: str, rule: str) -> str:
    return f"got the label {label} {where}, but {rule}; correct the labels, or give the last layer more units"
