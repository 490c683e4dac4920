"""From what a data function returns to an endless source of global batches, at any position.

A *pass* goes once through the training data. Its order depends on the seed and the number of the pass alone, so that
every process of a run sees the same global batches, and a resumed run goes on where the old one stopped.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.run_dir import RunDir
from distlaunch.config.run import Data as DataConfig
from distlaunch.config.run import RunConfig
from distlaunch.data.arrays import as_tensors
from distlaunch.data.function_references import load_function
from distlaunch.data.preprocessing import Preprocessing, prepare
from distlaunch.data.splits import Splits, read_splits
from distlaunch.data.user_functions import both_ways
from distlaunch.strategies.protocol import Batch, Source
from distlaunch.strategies.replica.input import pack

_ZERO = np.int64(0)
BUFFER = 10_000  # examples that `shuffle: true` holds for pipelines whose examples cannot be indexed


@dataclass(frozen=True)
class Split:
    """One split, ready to be read.

    Attributes:
        num_examples: None if unknown.
        num_batches: global batches of one pass; None if unknown.
        batches: pass number (an int64 tensor) and first batch -> dataset of row sources.
        load: see `Source.load`.
        empty: a row source without rows, which marks an end.
        endless: the pipeline repeats for ever, so that a pass has no end.
        name: `train` or `validation`.
        pick: pass and batch number in it -> a row source, at once; None where it takes reading all before it.
        load_raw: as `load`, without the preprocessing.
        labels: those of all examples, where they are arrays that nothing changes.
    """

    num_examples: int | None
    num_batches: int | None
    batches: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]
    load: Callable[[Any], Batch]
    empty: Any
    endless: bool = False
    name: str = "train"
    pick: Callable[[int, int], Any] | None = None
    load_raw: Callable[[Any], Batch] | None = None
    labels: Any = None

    def training_source(self, first_pass: int, offset: int, *, ends_visible: bool, skip: int = 0) -> Source:
        """Pass after pass without end.

        Args:
            first_pass, offset: where to begin, the offset in batches.
            ends_visible: put an element without rows after each pass (needed where its length is not known).
            skip: batches to read and drop first, where only that leads to the position.
        """

        passes = []

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            start = tf.where(number == first_pass, tf.constant(offset, tf.int64), tf.constant(0, tf.int64))
            batches = self.batches(number, start)
            passes.append(batches if tf.executing_eagerly() else None)  # in debug mode it owns its functions
            return batches.concatenate(tf.data.Dataset.from_tensors(self.empty)) if ends_visible else batches

        # passes are counted within the pipeline, which so runs on from one to the next
        elements = tf.data.Dataset.range(first_pass, np.iinfo(np.int64).max).flat_map(one_pass)
        first = skip if self.num_batches is None else first_pass * self.num_batches + offset
        elements = elements.skip(skip) if skip else elements
        return Source(elements, self.load, self.name, first, self.num_batches, ends=ends_visible)

    def evaluation_source(self) -> Source:
        """One pass in its own order, then elements without rows for ever."""
        end = tf.data.Dataset.from_tensors(self.empty).repeat()
        elements = self.batches(_ZERO, _ZERO).concatenate(end)
        return Source(elements, self.load, f"{self.name}:once", 0, self.num_batches, ends=self.num_batches is None)

    def first_rows(self, rows: int, *, raw: bool = False) -> Batch:
        """The batch of the first few examples; `raw`: before the preprocessing."""
        load = self.load_raw if raw and self.load_raw is not None else self.load
        for element in self.batches(_ZERO, _ZERO).take(1):
            return load(tf.nest.map_structure(lambda leaf: leaf[:rows], element))
        raise ConfigError(Problem(("data",), "the dataset is empty"))


def make_split(
    data: Any, config: DataConfig, *, seed: int, training: bool, preprocessing: Preprocessing | None = None
) -> Split:
    """Makes one split readable.

    Args:
        data: arrays or a `tf.data.Dataset` of examples (of global batches with `batched: true`).
        seed: order of the passes.
        training: False: own order, no class weights, nothing dropped.
        preprocessing: what the inputs of each batch go through last.
    """
    limit = config.train_examples if training else config.validation_examples
    example_map = both_ways(load_function(config.map, ("data", "map"))) if config.map else None
    weigh = _class_weights(config.class_weight) if training and config.class_weight else None
    order_seed = seed if training and config.shuffle is not False else None
    drop = training and config.remainder == "drop"
    if isinstance(data, tf.data.Dataset):
        split = _from_dataset(data, config, limit, example_map, order_seed, drop=drop)
    else:
        split = _from_arrays(data, config, limit, example_map, order_seed, drop=drop)
    load = split.load if weigh is None else _after(split.load, weigh)
    prepared = load if preprocessing is None else _after(load, preprocessing)
    return replace(split, load=prepared, load_raw=load, name="train" if training else "validation")


def _after(load: Callable[[Any], Batch], action: Callable[[Batch], Batch]) -> Callable[[Any], Batch]:
    return lambda rows: action(load(rows))


def open_splits(config: RunConfig, run: RunDir) -> tuple[Splits, Split, Split | None]:
    """What the config's data function gave, and its splits for training and validation.

    Args:
        run: keeps the layer that preprocesses.

    Raises:
        ConfigError: the data does not fit the config.
    """
    splits = with_preprocessing(read_splits(config.data), config, run)
    layer = splits.preprocessing
    train = make_split(splits.train, config.data, seed=config.seed, training=True, preprocessing=layer)
    validation = None
    if splits.validation is not None:
        validation = make_split(splits.validation, config.data, seed=config.seed, training=False, preprocessing=layer)
    if train.endless and config.train.steps_per_epoch is None:
        message = "missing: the training data repeats for ever, so an epoch needs a number of steps"
        raise ConfigError(Problem(("train", "steps_per_epoch"), message))
    if validation is not None and validation.endless and (config.validation is None or not config.validation.steps):
        message = "missing: the validation data repeats for ever, so validation needs a number of steps"
        raise ConfigError(Problem(("validation", "steps"), message))
    if config.strategy.has_coordinator and train.num_batches is None and config.train.steps_per_epoch is None:
        message = "missing: the length of the training data is not known, and workers take batches by number"
        raise ConfigError(Problem(("train", "steps_per_epoch"), f"{message}; say how many steps an epoch has"))
    return splits, train, validation


def with_preprocessing(splits: Splits, config: RunConfig, run: RunDir) -> Splits:
    section = config.data.preprocessing
    if section is None:
        return splits
    train = make_split(splits.train, config.data, seed=config.seed, training=True)
    if train.endless:
        message = "needs training data that ends, but it repeats for ever"
        raise ConfigError(Problem(("data", "preprocessing"), message))
    batches = train.batches(_ZERO, _ZERO).map(
        lambda *rows: keras.utils.unpack_x_y_sample_weight(train.load(pack(rows)))[0]
    )
    # another function or other arguments, as after a resume with --set, make another layer
    key = hashlib.sha256(repr(section).encode()).hexdigest()[:12]
    return replace(splits, preprocessing=prepare(section, batches, run.preprocessing(key)))


def _from_arrays(data: Any, config: DataConfig, limit: int | None, example_map: Any, seed: int | None, *,
                 drop: bool) -> Split:  # fmt: skip
    """Shuffles indices, and gathers rows only after they are split over replicas."""
    tensors, number = as_tensors(data, limit)
    size = config.global_batch
    if number < (size if drop else 1):
        raise ConfigError(Problem(("data",), f"{number} examples make no batch of {size}"))

    used = number - number % size if drop else number

    def order_of(number_of_pass: tf.Tensor) -> tf.Tensor:
        order = tf.range(number, dtype=tf.int64)
        if seed is not None:
            order = tf.random.experimental.stateless_shuffle(order, seed=[tf.constant(seed, tf.int64), number_of_pass])
        return order

    def batches(number_of_pass: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(order_of(number_of_pass)[start * size : used]).batch(size)

    @functools.lru_cache(maxsize=2)  # workers in one process may be in two passes
    def known_order(number_of_pass: int) -> np.ndarray:
        with tf.device("CPU:0"):
            return order_of(tf.constant(number_of_pass, tf.int64)).numpy()

    def pick(number_of_pass: int, index: int) -> np.ndarray:
        return known_order(number_of_pass)[index * size : min((index + 1) * size, used)]

    def gather(rows: tf.Tensor) -> Batch:
        return tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), tensors)

    def gather_and_map(rows: tf.Tensor) -> Batch:
        batch = gather(rows)
        spec = _mapped_spec(
            example_map, tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), tensors)
        )
        return tf.map_fn(lambda example: _apply(example_map, example), batch, fn_output_signature=spec)

    empty = tf.zeros([0], tf.int64)
    count = number // size if drop else math.ceil(number / size)
    labels = tensors[1] if isinstance(tensors, tuple) and len(tensors) > 1 and example_map is None else None
    load = gather_and_map if example_map else gather
    return Split(number, count, batches, load, empty, pick=pick, labels=labels)


def _from_dataset(dataset: tf.data.Dataset, config: DataConfig, limit: int | None, example_map: Any, seed: int | None,
                  *, drop: bool) -> Split:  # fmt: skip
    size = 1 if config.batched else config.global_batch
    if limit is not None:
        dataset = dataset.take(math.ceil(limit / config.global_batch) if config.batched else limit)
    length = int(dataset.cardinality())
    known = length if length >= 0 else None

    def batches(number_of_pass: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
        examples = dataset
        if not config.batched:
            if seed is not None:
                buffer = BUFFER if config.shuffle is True else int(config.shuffle)
                if not tf.executing_eagerly():
                    # TensorFlow joins this with the graph's seed, and compares both with 0, which a tensor forbids
                    tf.random.set_seed(seed + 1)
                # one number of two: seeds that are neighbours must not share the orders of neighbouring passes
                order: Any = number_of_pass + tf.constant(seed, tf.int64) * 1_000_003
                examples = examples.shuffle(buffer, seed=order, reshuffle_each_iteration=False)
            if example_map is not None:
                # after the shuffle, whose buffer then holds examples as they are read
                examples = examples.map(lambda *e: _apply(example_map, pack(e)), num_parallel_calls=tf.data.AUTOTUNE)
            examples = examples.batch(size)
        if drop:
            examples = examples.filter(
                lambda *batch: tf.shape(tf.nest.flatten(pack(batch))[0])[0] == config.global_batch
            )
        return examples.skip(start)

    spec = batches(_ZERO, _ZERO).element_spec
    count = None if known is None else known // size if drop and not config.batched else math.ceil(known / size)
    if count == 0:
        raise ConfigError(Problem(("data",), f"{known} examples make no batch of {config.global_batch}"))
    return Split(
        None if config.batched else known,
        None if drop and config.batched else count,
        batches,
        lambda element: element,
        tf.nest.map_structure(_no_rows, spec),
        endless=length == tf.data.INFINITE_CARDINALITY,
    )


def _no_rows(spec: Any) -> Any:
    """A value of a batched spec with zero rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0], spec.dtype)
        rank = spec.shape.rank if spec.shape.rank is not None else 2
        return tf.RaggedTensor.from_nested_row_splits(values, [tf.zeros([1], tf.int64)] * (rank - 1))
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 0 for size in spec.shape[1:])]
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)


def _apply(function: Callable[..., Any], example: Any) -> Any:
    return function(*example) if isinstance(example, tuple) else function(example)


def _mapped_spec(function: Callable[..., Any], spec: Any) -> Any:
    outputs = tf.function(lambda example: _apply(function, example)).get_concrete_function(spec).structured_outputs
    return tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), outputs)


def _class_weights(weights: Mapping[int, float]) -> Callable[[Batch], Batch]:
    """Adds the weight of each example's class as its sample weight, as Keras `fit(class_weight=...)` does."""
    table = np.ones(max(weights) + 1, np.float32)
    for label, weight in weights.items():
        table[label] = weight

    def weigh(batch: Batch) -> Batch:
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ConfigError(Problem(("data", "class_weight"), "needs batches (x, y) without sample weights"))
        x, y = batch
        labels = tf.cast(y, tf.int64)
        if labels.shape.rank is not None and labels.shape.rank > 1:
            labels = tf.squeeze(labels, -1) if labels.shape[-1] == 1 else tf.argmax(y, -1)
        known = tf.gather(table, tf.clip_by_value(labels, 0, len(table) - 1))
        return x, y, tf.where((labels >= 0) & (labels < len(table)), known, tf.ones_like(known))

    return weigh
