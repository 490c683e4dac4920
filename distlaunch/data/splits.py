"""What the config's data function gives: arrays or pipelines, for training and for validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.function_references import call
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.random_access import gives_items


@dataclass(frozen=True)
class Splits:
    """Each split is `(x, y[, weight])` arrays, a `tf.data.Dataset`, or an object that gives examples by number.

    Attributes:
        origin: where the data came from, for people.
        preprocessing: what the inputs of each batch go through last.
    """

    train: Any
    validation: Any | None
    origin: str
    preprocessing: Preprocessing | None = None


def read_splits(config: DataConfig) -> Splits:
    """Calls the config's data function, or reads from tensorflow-datasets."""
    if config.tfds is not None:
        return _read_tfds(config)
    assert config.function is not None, "the config checks see to it"
    returned = call(config.function, config.args, ("data",))
    origin = config.function
    if isinstance(returned, Mapping) and "train" in returned:
        unknown = set(returned) - {"train", "validation", "origin"}
        if unknown:
            message = f"{config.function} returned the keys {sorted(returned)}; allowed are train, validation, origin"
            raise ConfigError(Problem(("data", "function"), message))
        return Splits(returned["train"], returned.get("validation"), returned.get("origin", origin))
    if isinstance(returned, (tuple, list)) and len(returned) == 2 and all(_is_dataset(part) for part in returned):
        return Splits(returned[0], returned[1], origin)
    if _is_dataset(returned) or gives_items(returned):
        return Splits(returned, None, origin)
    message = (
        f"{config.function} returned {type(returned).__name__}; expected {{'train': ..., 'validation': ...}}, each a "
        "tf.data.Dataset, a tuple of arrays (x, y) or (x, y, sample_weight), or an object with __len__ and __getitem__ "
        "that gives an example"
    )
    raise ConfigError(Problem(("data", "function"), message))


def _is_dataset(value: Any) -> bool:
    return isinstance(value, (tf.data.Dataset, tuple, list))


def _read_tfds(config: DataConfig) -> Splits:
    assert config.tfds is not None
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        message = "tensorflow-datasets is not installed: pip install tensorflow-datasets"
        raise ConfigError(Problem(("data", "tfds"), message)) from None
    source = config.tfds

    def load(split: str) -> Any:
        try:
            return tfds.load(
                source.name, split=split, data_dir=source.data_dir, download=source.download, as_supervised=True
            )
        # AssertionError: what tfds raises where a dataset is not prepared
        except (tfds.core.DatasetNotFoundError, AssertionError, FileNotFoundError, ValueError) as error:
            hint = "" if source.download else " (tfds.download is false: the dataset must be prepared already)"
            raise ConfigError(Problem(("data", "tfds"), f"{str(error).strip().splitlines()[0]}{hint}")) from None

    validation = None if source.validation is None else load(source.validation)
    return Splits(load(source.train), validation, f"tensorflow-datasets {source.name}")
