"""Steps for each example by itself: reading, decoding, `data.map`, `data.augment`; in tf.data's threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.cores import num_cores
from distlaunch.config.references.signatures import SEED, map_with_seed
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch, Index, num_rows, pack
from distlaunch.data.examples.example_times import counted, timed
from distlaunch.data.function_references import load_function
from distlaunch.data.seeds import seed_of_pass
from distlaunch.data.user_functions import both_ways


class ExampleMap:
    """The config's `data.map` and `data.augment`, one after the other.

    Args:
        map_function: for every split; None: there is none.
        augment: for training only; None: there is none, or the split is not for training.
        seed: of the run.

    Attributes:
        work: names of the keys whose functions are called.
    """

    def __init__(
        self, map_function: Callable[..., Any] | None, augment: Callable[..., Any] | None = None, seed: int = 0
    ) -> None:
        self._map = None if map_function is None else both_ways(map_function)
        self._augment = None if augment is None else both_ways(augment)
        self._seeded = augment is not None and _takes_seed(augment)
        self._seed = seed
        self.work = [key for key, function in (("map", map_function), ("augment", augment)) if function is not None]

    def __call__(self, example: Any, number_of_pass: Index, index: tf.Tensor) -> Any:
        """Return what the functions make of an example.

        Args:
            number_of_pass, index: int64 scalars; what is random depends on the run's seed and on them, so that it is
                the same whichever process does it.
        """
        if self._map is not None:
            example = _called(self._map, example, "map")
        if self._augment is None:
            return example
        seed = {SEED: tf.stack([seed_of_pass(self._seed, number_of_pass), index])} if self._seeded else {}
        return _called(self._augment, example, "augment", **seed)


def _called(function: Callable[..., Any], example: Any, key: str, **by_name: Any) -> Any:
    arguments = example if isinstance(example, tuple) else (example,)
    try:
        inspect.signature(function).bind(*arguments, **by_name)
    except TypeError:
        number = len(arguments)
        names = ("the example", "(x, y)", "(x, y, sample_weight)")
        given = names[number - 1] if number <= len(names) else f"the {number} parts of an example"
        message = f"it is called with {given}, which {_signature(function)} does not take"
        raise ConfigError(Problem(("data", key), message)) from None
    return function(*arguments, **by_name)


def _takes_seed(function: Callable[..., Any]) -> bool:
    return SEED in inspect.signature(function).parameters


def _signature(function: Callable[..., Any]) -> str:
    return f"{function.__name__}({', '.join(inspect.signature(function).parameters)})"


def example_map(config: DataConfig, seed: int, *, training: bool) -> ExampleMap | None:
    """Return what the config does to each example of a split; None if nothing.

    Raises:
        ConfigError: there is no such function, or `map` takes `seed`.
    """
    keys = {key: reference for key in ("map", "augment") if (reference := getattr(config, key)) is not None}
    functions = {key: load_function(reference, ("data", key)) for key, reference in keys.items()}
    if "map" in functions and _takes_seed(functions["map"]):
        # the check of the config has not seen it: behind a decorator, or made by other code
        raise ConfigError(Problem(("data", "map"), map_with_seed(_signature(functions["map"]))))
    augment = functions.get("augment") if training else None
    return ExampleMap(functions.get("map"), augment, seed) if augment is not None or "map" in functions else None


def num_threads(config: DataConfig) -> int:
    """Return the number of examples that a process reads and maps at the same time."""
    if config.threads is not None:
        return config.threads
    # a thread for each process that reads waits for it
    return config.processes or num_cores()


def batches_at_once(config: DataConfig) -> int:
    """Return the number of batches that are made at the same time, each by its share of the threads.

    The threads of one wait for its last example, and while its examples are joined; those of the other do not. Measured
    with JPEG images on two threads: a tenth of the time.
    """
    return 2 if num_threads(config) % 2 == 0 else 1


def batch_of(rows: Any, examples: tf.data.Dataset, one: Callable[..., Any], threads: int, began: tf.Tensor, *,
             skips: bool = False, at_once: int = 1) -> Batch:  # fmt: skip
    """Return the batch of `one` applied to each example, in their order; without rows if there are none.

    A dataset within the input pipeline, where `tf.map_fn` would take one example after the other.

    Args:
        rows: the row source that `examples` come from, one for each of its rows.
        began: when the batch was begun, as `graph_clock.now` gives it.
        skips: leave out the examples with which `one` fails; else one fails the batch.
        at_once: how many batches are made at the same time; they share the threads.
    """
    made = examples.map(timed(one), num_parallel_calls=threads // at_once, deterministic=True)
    if skips:
        made = made.ignore_errors()
    batches = made.batch(tf.maximum(num_rows(rows), 1))
    none = tf.data.Dataset.from_tensors(tf.nest.map_structure(no_rows, batches.element_spec))
    batch, seconds = batches.concatenate(none).take(1).get_single_element()
    return counted(batch, seconds, began, at_once)


def first_failure(examples: Iterable[tuple[str, Any]], one: Callable[[Any], Any]) -> tuple[str, Exception] | None:
    """Return the first example with which `one` fails when run eagerly; see `read_failures.Find`.

    Args:
        examples: what each is called, and what `one` takes.
    """
    for name, example in examples:
        try:
            with tf.device("CPU:0"):
                one(example)
        except Exception as error:
            return name, error
    return None


def no_rows(spec: Any) -> Any:
    """Return a value of a batched spec with zero rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0], spec.dtype)
        rank = spec.shape.rank if spec.shape.rank is not None else 2
        return tf.RaggedTensor.from_nested_row_splits(values, [tf.zeros([1], tf.int64)] * (rank - 1))
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 0 for size in spec.shape[1:])]
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if spec.dtype == tf.variant:
        return tf.stack([tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(0))])[:0]
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)


def packed(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Adapt a function to `Dataset.map`, which passes the components of a tuple as arguments."""
    return lambda *components: function(pack(components))
