"""Splits for training and validation, as the config's data function returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem, reason_of
from distlaunch.config.checks.unused import changed
from distlaunch.config.run import Data as DataConfig
from distlaunch.config.run import RunConfig
from distlaunch.data.context import StreamContext, WorkerContext
from distlaunch.data.examples.random_access import gives_items
from distlaunch.data.function_references import call
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.patches.tensorflow_late import is_a, tf

SINGLE_WORKER = WorkerContext(num_workers=1, worker=0)


@dataclass(frozen=True)
class StreamData:
    """A split whose examples come in streams.

    Attributes:
        streams: the streams of this process, by index.
        number: number of streams in all processes.
    """

    streams: Mapping[int, tf.data.Dataset]
    number: int


@dataclass(frozen=True)
class PyData:
    """A split that is a `keras.utils.PyDataset`.

    Attributes:
        reload: calls the data function again, and returns a dataset whose hooks have not been called.
    """

    dataset: keras.utils.PyDataset
    reload: Callable[[], keras.utils.PyDataset]


@dataclass(frozen=True)
class Splits:
    """The splits that a data function has returned.

    Each split is a tuple of arrays `(x, y[, weight])`, a `tf.data.Dataset`, an object that returns examples by index,
    `StreamData` or `PyData`.

    Attributes:
        origin: description of where the data came from, for messages.
        preprocessing: applied to the inputs of each batch at the end.
    """

    train: Any
    validation: Any | None
    origin: str
    preprocessing: Preprocessing | None = None


def read_splits(config: DataConfig, context: WorkerContext = SINGLE_WORKER) -> Splits:
    """Call the config's data function, or read from tensorflow-datasets.

    Args:
        context: the worker whose part to read, if workers have different data or streams.
    """
    if config.tfds is not None:
        return _read_tfds(config)
    if config.streams is not None:
        return _read_streams(config, config.streams, context)
    return _with_py_data(config, context if config.sharding == "function" else None)


def _with_py_data(config: DataConfig, context: WorkerContext | None) -> Splits:
    splits = _call_data_function(config, context)

    def given(name: str) -> Any:
        split = getattr(splits, name)
        if not isinstance(split, keras.utils.PyDataset):
            return split
        return PyData(split, lambda: getattr(_call_data_function(config, context), name))

    return replace(splits, train=given("train"), validation=given("validation"))


def _read_streams(config: DataConfig, number: int, context: WorkerContext) -> Splits:
    """Read the streams of this worker, which are consecutive, so that its rows are consecutive in the batch too."""
    each = number // context.num_workers
    own_streams = range(context.worker * each, (context.worker + 1) * each)
    read = {stream: _call_data_function(config, StreamContext(number, stream)) for stream in own_streams}

    def joined(name: str) -> StreamData | None:
        parts = {stream: getattr(splits, name) for stream, splits in read.items()}
        if all(part is None for part in parts.values()):
            return None
        for stream, part in parts.items():
            if not is_a(part, "data.Dataset"):
                message = f"{config.function} returned {type(part).__name__} as {name} for stream {stream}"
                hint = "with `data.streams` it must be a tf.data.Dataset of the stream's examples"
                raise ConfigError(Problem(("data", "function"), f"{message}; {hint}"))
            if part.element_spec != (first := next(iter(parts.values())).element_spec):
                message = f"stream {stream} has other types of examples for {name}: {part.element_spec}, not {first}"
                raise ConfigError(Problem(("data", "function"), message))
        return StreamData(parts, number)

    train = joined("train")
    assert train is not None, "a missing training split raises an error before"
    return Splits(train, joined("validation"), next(iter(read.values())).origin)


def _call_data_function(config: DataConfig, context: WorkerContext | StreamContext | None) -> Splits:
    assert config.function is not None, "checked with the config"
    args = config.args if context is None else {**config.args, "context": context}
    returned = call(config.function, args, ("data",))
    origin = config.function
    if isinstance(returned, Mapping) and "train" in returned:
        unknown = set(returned) - {"train", "validation", "origin"}
        if unknown:
            message = f"{config.function} returned the keys {sorted(returned)}; allowed are train, validation, origin"
            raise ConfigError(Problem(("data", "function"), message))
        return Splits(returned["train"], returned.get("validation"), returned.get("origin", origin))
    if isinstance(returned, (tuple, list)) and len(returned) == 2 and all(_is_dataset(part) for part in returned):
        return Splits(returned[0], returned[1], origin)
    if _is_dataset(returned) or gives_items(returned) or isinstance(returned, keras.utils.PyDataset):
        return Splits(returned, None, origin)
    message = (
        f"{config.function} returned {type(returned).__name__}; expected {{'train': ..., 'validation': ...}}, each a "
        "tf.data.Dataset, a tuple of arrays (x, y) or (x, y, sample_weight), an object with __len__ and __getitem__ "
        "that return an example, or a keras.utils.PyDataset"
    )
    raise ConfigError(Problem(("data", "function"), message))


def _is_dataset(value: Any) -> bool:
    return isinstance(value, (tuple, list)) or is_a(value, "data.Dataset")


def _read_tfds(config: DataConfig) -> Splits:
    assert config.tfds is not None
    try:
        import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]
    except ImportError:
        message = "tensorflow-datasets is not installed: pip install tensorflow-datasets"
        raise ConfigError(Problem(("data", "tfds"), message)) from None
    source = config.tfds

    def load(split: str) -> Any:
        try:
            return tfds.load(
                source.name, split=split, data_dir=source.data_dir, download=source.download, as_supervised=True
            )
        # tfds raises AssertionError if a dataset is not prepared
        except (tfds.core.DatasetNotFoundError, AssertionError, FileNotFoundError, ValueError) as error:
            hint = "" if source.download else " (tfds.download is false, so the dataset must be prepared already)"
            raise ConfigError(Problem(("data", "tfds"), f"{reason_of(error)}{hint}")) from None

    validation = None if source.validation is None else load(source.validation)
    return Splits(load(source.train), validation, f"tensorflow-datasets {source.name}")


def unused_settings_of(config: RunConfig, splits: Splits) -> Iterator[str]:
    """Yield a warning for each setting that has no effect on this data."""
    data, validation = config.data, config.validation
    is_pipeline = isinstance(splits.train, StreamData) or is_a(splits.train, "data.Dataset")
    # `type` and not `isinstance`: True is an int
    if type(data.shuffle) is int and not is_pipeline:
        why = "the data is not a tf.data pipeline, and is shuffled as a whole"
        yield f"data.shuffle: got {data.shuffle}, but a buffer size has no effect, because {why}; write `true`"
    if changed(data, "shuffle_buffer_bytes") and not is_pipeline:
        yield "data.shuffle_buffer_bytes: has no effect, because the data is not a tf.data pipeline; remove it"
    if splits.validation is not None:
        return
    for key in ("steps", "every_epochs"):
        if validation is not None and changed(validation, key):
            yield f"validation.{key}: has no effect, because there is no validation data"
    if data.validation_examples is not None:
        yield "data.validation_examples: has no effect, because there is no validation data"
