"""Turns the result of a data function into splits that can be read at any position."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.run_dir import RunDir
from distlaunch.config.run import Data as DataConfig
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Share, pack
from distlaunch.data.class_weights import class_weights
from distlaunch.data.context import WorkerContext
from distlaunch.data.examples.each_example import example_map
from distlaunch.data.examples.random_access import Arrays, FileExamples, Items, gives_items
from distlaunch.data.examples.reader_pool import ReaderPool, reader_pool
from distlaunch.data.files.base import IndexedFiles
from distlaunch.data.on_host.indexed import HostIndexed
from distlaunch.data.on_host.py_datasets import HostPyDatasets
from distlaunch.data.preprocessing import Preprocessing, prepare
from distlaunch.data.rows import first_row
from distlaunch.data.sources.indexed import Indexed
from distlaunch.data.sources.pipelines import Pipeline
from distlaunch.data.sources.py_datasets import PyDatasets, check_config
from distlaunch.data.sources.streams import Streams
from distlaunch.data.split import Split
from distlaunch.data.splits import PyData, Splits, StreamData, read_splits
from distlaunch.data.structures import flatten
from distlaunch.patches.tensorflow_late import is_a

__all__ = ["Split", "make_split", "open_splits", "with_preprocessing"]

_ZERO = np.int64(0)
WHOLE = Share()


def worker_of(share: Share) -> WorkerContext:
    return WorkerContext(num_workers=share.number, worker=share.index)


def first_worker(config: RunConfig) -> WorkerContext | None:
    """Return the worker whose examples a coordinator inspects, or None if there is no coordinator."""
    return WorkerContext(config.cluster.num_workers, worker=0) if config.strategy.has_coordinator else None


def make_split(
    data: Any, config: DataConfig, *, seed: int, training: bool, preprocessing: Preprocessing | None = None,
    share: Share = WHOLE, epoch_steps: int | None = None, on_host: bool = False,
) -> Split:  # fmt: skip
    """Make one split readable.

    Args:
        data: arrays, an object that returns examples by number, or a `tf.data.Dataset` of examples (of global batches
            with `batched: true`).
        seed: seed of the order of each pass.
        training: whether the split is for training. Otherwise the data keeps its order, there are no class weights, and
            nothing is dropped, skipped or augmented.
        preprocessing: applied to the inputs of each batch at the end.
        share: the part of each batch that this data is for, if other processes have other data.
        epoch_steps: number of batches of an epoch, if the config sets it.
        on_host: whether to read NumPy arrays without TensorFlow, if the data and its processing do not need it.
    """
    on_host = on_host and preprocessing is None and _can_be_read_on_host(data, config)
    if isinstance(data, PyData):
        return _SplitBuilder(
            data, config, seed, preprocessing, training=training, epoch_steps=epoch_steps, on_host=on_host
        ).split()
    if config.global_batch is None:
        message = f"missing: {config.function} gives examples, not batches like a keras.utils.PyDataset"
        hint = "add `global_batch:` below `data:`, the number of examples in a step"
        raise ConfigError(Problem(("data", "global_batch"), f"{message}; {hint}"))
    if share.number > 1 and not isinstance(data, StreamData):
        config = config.model_copy(update={"global_batch": _num_rows_of_share(share, config.batch)})
        _check_not_empty(data, share)
    if training and config.processes is not None:
        _check_processes(data, config)
    if training and config.on_error == "skip" and is_a(data, "data.Dataset"):
        message = "got 'skip', but in a tf.data pipeline no other example can replace one that fails"
        hint = "write 'stop', and skip such examples in the pipeline itself, with `.ignore_errors()`"
        raise ConfigError(Problem(("data", "on_error"), f"{message}; {hint}"))
    return _SplitBuilder(
        data, config, seed, preprocessing, training=training, is_process_local=share.number > 1,
        epoch_steps=epoch_steps, on_host=on_host
    ).split()  # fmt: skip


class _SplitBuilder:
    """Builds a split and its other forms from data and config; see `split.Forms`.

    Args:
        training: whether this is the split for training, which has other forms.
        is_process_local: see `Split.is_process_local`.
        on_host: see `Split.on_host`.
    """

    def __init__(self, data: Any, config: DataConfig, seed: int, preprocessing: Preprocessing | None, *,
                 training: bool, is_process_local: bool = False, epoch_steps: int | None = None,
                 on_host: bool = False) -> None:  # fmt: skip
        self._data, self._config, self._seed, self._preprocessing = data, config, seed, preprocessing
        self._training, self._is_process_local, self._epoch_steps = training, is_process_local, epoch_steps
        self._on_host = on_host
        self._limit = config.train_examples if training else config.validation_examples
        self._skips = training and config.on_error == "skip"
        if not isinstance(data, (PyData, StreamData)) and not is_a(data, "data.Dataset"):
            noun = "example" if training else "validation example"
            self._data = _examples(
                data, self._limit, noun, skips=self._skips, pool=_pool(data, config, seed), on_host=on_host
            )
        self._plain = None if isinstance(data, PyData) else example_map(config, seed, training=False)

    def split(self) -> Split:
        return (
            self._build_form(trains=True, augmented=True).with_forms(self)
            if self._training
            else self._build_form(trains=False)
        )

    @functools.cached_property
    def unaugmented(self) -> Split | None:
        return None if self._config.augment is None else self._build_form(trains=True)

    @functools.cached_property
    def in_order(self) -> Split:
        split = self._build_form(trains=False)
        # the processes agree on a length only for the form that training reads
        return split.with_length(None, None) if split.is_process_local else split

    def _build_form(self, *, trains: bool, augmented: bool = False) -> Split:
        """Return a form of the split.

        Args:
            trains: whether the form has the order, the class weights and the omissions of training. Otherwise it is
                complete, unchanged and not shuffled.
        """
        split = self._read(trains=trains, augmented=augmented)
        if trains and self._config.class_weight:
            split = split.with_transform(class_weights(self._config.class_weight))
        if self._preprocessing is not None:
            split = split.with_preprocessing(self._preprocessing)
        return split.with_role("train" if self._training else "validation", is_process_local=self._is_process_local)

    def _read(self, *, trains: bool, augmented: bool) -> Split:
        data, config, limit = self._data, self._config, self._limit
        shuffles, drop = trains and config.shuffle is not False, trains and config.remainder == "drop"
        if isinstance(data, PyData):
            # a separate dataset, because the hooks of the one that training reads must not be called
            data = PyData(data.reload(), data.reload) if self._training and not trains else data
            kind = HostPyDatasets if self._on_host else PyDatasets
            datasets = kind(data, config, limit, self._seed, shuffle=shuffles, trains=trains, drop=drop,
                            epoch_steps=self._epoch_steps)  # fmt: skip
            check_config(config, data.dataset, datasets.global_batch, training=self._training)
            return datasets
        mapping = example_map(config, self._seed, training=True) if augmented else self._plain
        seed = self._seed if shuffles else None
        if isinstance(data, StreamData):
            return Streams(data, config, mapping, seed, "training" if self._training else "validation")
        if is_a(data, "data.Dataset"):
            return Pipeline(data, config, limit, mapping, seed, drop=drop, epoch_steps=self._epoch_steps)
        if self._on_host:
            return HostIndexed(data, config, seed, drop=drop, skips=trains and self._skips)
        return Indexed(data, config, mapping, seed, drop=drop, skips=trains and self._skips)


def _check_not_empty(data: Any, share: Share) -> None:
    """Raise ConfigError for a worker without examples, which has no row that could be used as a stand-in."""
    if is_a(data, "data.Dataset"):
        known = int(data.cardinality())
        is_empty = known == 0 or (known < 0 and not any(True for _ in data.take(1)))
    else:
        is_empty = not len(data if isinstance(data, IndexedFiles) or gives_items(data) else flatten(data)[0])
    if is_empty:
        message = f"worker {share.index} of {share.number} has no training examples, but each worker needs at least one"
        raise ConfigError(Problem(("data", "function"), f"{message}; use fewer workers, or divide the examples evenly"))


def _num_rows_of_share(share: Share, global_batch: int) -> int:
    return first_row(global_batch, share.index + 1, share.number) - first_row(global_batch, share.index, share.number)


def shares_of_splits(config: DataConfig, share: Share) -> tuple[Share, Share]:
    """Return the shares for the training and the validation data; the whole batch if all processes read the same."""
    of_streams = share if config.streams is not None else WHOLE
    return (share if config.sharding == "function" else of_streams), of_streams


def _can_be_read_on_host(data: Any, config: DataConfig) -> bool:
    """Return whether neither the data nor the functions that the config names need TensorFlow."""
    if config.map is not None or config.augment is not None or isinstance(data, StreamData):
        return False
    if isinstance(data, IndexedFiles):
        return not data.decodes_with_tensorflow
    return not is_a(data, "data.Dataset")


def _examples(data: Any, limit: int | None, noun: str, *, skips: bool, pool: ReaderPool | None, on_host: bool) -> Any:
    if isinstance(data, IndexedFiles):
        return FileExamples(data, limit, noun, skips=skips)
    if gives_items(data):
        return Items(data, limit, noun, skips=skips, pool=pool)
    return Arrays(data, limit, noun, on_host=on_host)


def _check_processes(data: Any, config: DataConfig) -> None:
    if _is_read_by_python(data):
        return
    kinds = {IndexedFiles: "files of distlaunch.data", StreamData: "streams"}
    kind = next((words for of, words in kinds.items() if isinstance(data, of)), "arrays")
    kind = "a tf.data pipeline" if is_a(data, "data.Dataset") else kind
    source = f"{config.function or 'the data'} gives {kind}"
    message = f"got {config.processes}, but {source}, whose examples are not read by Python"
    hint = "remove it, since it is for objects with __getitem__; TensorFlow's operations use `threads`"
    raise ConfigError(Problem(("data", "processes"), f"{message}; {hint}"))


def _is_read_by_python(data: Any) -> bool:
    return gives_items(data) and not isinstance(data, IndexedFiles)


def _pool(data: Any, config: DataConfig, seed: int) -> ReaderPool | None:
    # `processes` is for the training data; the validation data may be of another kind
    return reader_pool(data, config.processes, seed) if config.processes and _is_read_by_python(data) else None


def with_global_batch(config: RunConfig, train: Split) -> RunConfig:
    """Return the config with the global batch of the training data, if the config does not set it."""
    if config.data.global_batch is not None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"global_batch": train.global_batch})})


def make_splits(
    splits: Splits, config: RunConfig, share: Share = WHOLE, *, on_host: bool = False
) -> tuple[Split, Split | None]:
    """Make the data for training and validation readable; see `make_split` for the arguments."""
    layer = splits.preprocessing
    of_train, of_validation = shares_of_splits(config.data, share)
    train = make_split(splits.train, config.data, seed=config.seed, training=True, preprocessing=layer, share=of_train,
                       epoch_steps=config.train.steps_per_epoch, on_host=on_host)  # fmt: skip
    if splits.validation is None:
        return train, None
    data = with_global_batch(config, train).data
    return train, make_split(splits.validation, data, seed=config.seed, training=False, preprocessing=layer,
                             share=of_validation, on_host=on_host)  # fmt: skip


def open_splits(
    config: RunConfig, run: RunDir, share: Share = WHOLE, context: WorkerContext | None = None, *, on_host: bool = False
) -> tuple[Splits, Split, Split | None]:
    """Return the result of the config's data function, and its splits for training and validation.

    Args:
        run: the run, which stores the preprocessing layer.
        share: this process's part of each batch, if processes have different examples.
        context: the worker for which the data function is called; None for the worker with this share.
        on_host: see `make_split`.

    Raises:
        ConfigError: the data does not fit the config.
    """
    splits = with_preprocessing(read_splits(config.data, context or worker_of(share)), config, run)
    train, validation = make_splits(splits, config, share, on_host=on_host)
    if train.endless and config.train.steps_per_epoch is None:
        message = "missing: the training data is endless, so an epoch needs a number of steps"
        raise ConfigError(Problem(("train", "steps_per_epoch"), message))
    if validation is not None and validation.endless and (config.validation is None or not config.validation.steps):
        message = "missing: the validation data is endless, so validation needs a number of steps"
        raise ConfigError(Problem(("validation", "steps"), message))
    if config.strategy.has_coordinator and train.num_batches is None and config.train.steps_per_epoch is None:
        message = "missing: the length of the training data is unknown, but workers read batches by number"
        raise ConfigError(Problem(("train", "steps_per_epoch"), f"{message}; set the number of steps of an epoch"))
    return splits, train, validation


def with_preprocessing(splits: Splits, config: RunConfig, run: RunDir) -> Splits:
    section = config.data.preprocessing
    if section is None:
        return splits
    # with streams, each process reads only some of them, but all need the same layer
    everything = splits if config.data.streams is None else read_splits(config.data)
    unaugmented = config.data.model_copy(update={"augment": None})
    data = everything.train
    # a separate dataset, because the hooks of the one that training reads must not be called
    data = PyData(data.reload(), data.reload) if isinstance(data, PyData) else data
    train = make_split(data, unaugmented, seed=config.seed, training=True)
    if train.endless:
        message = "needs training data that ends, but the data is endless"
        raise ConfigError(Problem(("data", "preprocessing"), message))
    batches = train.batches(_ZERO, _ZERO).map(
        lambda *rows: keras.utils.unpack_x_y_sample_weight(train.load(pack(rows)))[0]
    )
    # a resume with --set may change the function or its arguments, which need another layer
    return replace(splits, preprocessing=prepare(section, batches, run.preprocessing(section.key)))
