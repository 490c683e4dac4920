"""Detects pipelines whose elements are batches already.

Without this check, training would make batches of these batches, and its losses would look plausible.
"""

from __future__ import annotations

from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import joined
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.split import Batching, Split
from distlaunch.patches.tensorflow_late import tf


def check_not_batched(splits: dict[str, Split], config: DataConfig, model: Any) -> None:
    """Raise ConfigError if the elements of a split are batches, without `batched: true`.

    The declared inputs of a model show the shape of one example. Without them, the pipeline must show that its elements
    are batches.

    Args:
        splits: the splits by name.
        model: the model, or None before it exists. Without it, batches are an error only if their sizes differ, because
            no model could take those as examples.
    """
    found = {name: split.batching() for name, split in splits.items()}
    rows = {name: each.rows for name, each in found.items() if each is not None and _is_batched(
        splits[name], each, model)}  # fmt: skip
    if not rows:
        return
    which = f"{config.function} returns a pipeline of batches for {joined(list(rows))}"
    sizes = joined([f"{number:,}" for number in dict.fromkeys(rows.values())])
    message = f"{which}: each element has {sizes} examples, but would count as one example"
    if config.streams is not None:
        remedy = "remove `.batch(...)`, since each stream gives a part of a batch"
    elif len(rows) == len(splits):
        remedy = "write `batched: true` to train on these batches as they are, or remove `.batch(...)`"
    else:
        remedy = "remove `.batch(...)`, as in the other split"
    hint = f"{remedy}; if each element is one example, such as a matrix, write `batched: false`"
    raise ConfigError(Problem(("data", "batched"), f"missing: {message}; {hint}"))


def check_sizes(splits: dict[str, Split], config: DataConfig) -> None:
    """Raise ConfigError for pipelines of unknown length without examples, and for batches that have another size.

    Without this check, an empty validation would have the loss 0.

    Args:
        splits: the splits by name.
    """
    for name, split in splits.items():
        if split.is_found_empty():
            message = f"{config.function} returns a pipeline without a single example for {name}"
            raise ConfigError(Problem(("data", "function"), f"{message}; check its files and its filters"))
    train = splits.get("train")
    rows, wanted = (None, None) if train is None else (train.rows_of_own_batches(), train.global_batch)
    if rows is not None and rows != wanted:
        each = "" if wanted == config.global_batch else f", of which each worker gives {wanted}"
        message = f"got {config.global_batch}{each}, but {config.function} returns batches of {rows} examples"
        raise ConfigError(Problem(("data", "global_batch"), f"{message}; change the number, or the pipeline"))


def _is_batched(split: Split, seems: Batching, model: Any) -> bool:
    if model is None:
        return seems.is_certain and not seems.is_even
    is_certain = seems.is_certain
    declared = getattr(model, "inputs", None) or []
    given = tf.nest.flatten(keras.utils.unpack_x_y_sample_weight(split.first_rows(1))[0])
    if len(declared) != len(given) or not declared:
        return is_certain
    shapes = [(tuple(each.shape), tuple(value.shape)) for each, value in zip(given, declared, strict=True)]
    if all(len(rows) == len(takes) for rows, takes in shapes):
        return False
    return all(_is_batch(rows, takes) for rows, takes in shapes) or is_certain


def _is_batch(rows: tuple[int | None, ...], takes: tuple[int | None, ...]) -> bool:
    """Return whether an element of the pipeline has the shape of a batch of one of the model's inputs.

    An element that only has an additional last dimension of size 1 is not a batch, because Keras drops this dimension.

    Args:
        rows: shape of several elements; the first dimension is their number.
        takes: shape of the input; the first dimension is the number of examples.
    """
    if len(rows) != len(takes) + 1 or (rows[-1] == 1 and takes[-1] != 1):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(rows[2:], takes[1:], strict=True))
