"""Processes each example separately, in tf.data's threads: reading, decoding, `data.map` and `data.augment`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.cluster.cores import num_cores
from distlaunch.config.references.signatures import SEED, map_with_seed
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch, Index, num_rows, pack
from distlaunch.data.examples.example_times import add_batch_times, with_duration
from distlaunch.data.function_references import load_function
from distlaunch.data.seeds import seed_of_pass
from distlaunch.data.user_functions import with_autograph_in_graphs
from distlaunch.patches.tensorflow_late import tf


class ExampleMap:
    """The config's `data.map` and `data.augment`, one after the other.

    Args:
        map_function: function of `data.map`, or None.
        augment: function of `data.augment`; None without one, or for a split that is not for training.
        seed: the run's seed.

    Attributes:
        work: the config keys whose functions are called: `map`, `augment`.
    """

    def __init__(
        self, map_function: Callable[..., Any] | None, augment: Callable[..., Any] | None = None, seed: int = 0
    ) -> None:
        self._map = None if map_function is None else with_autograph_in_graphs(map_function)
        self._augment = None if augment is None else with_autograph_in_graphs(augment)
        self._seeded = augment is not None and _takes_seed(augment)
        self._seed = seed
        self.work = [key for key, function in (("map", map_function), ("augment", augment)) if function is not None]

    def __call__(self, example: Any, number_of_pass: Index, index: tf.Tensor) -> Any:
        """Return the result of the functions for an example.

        Random numbers depend only on the run's seed, the pass and the example, so all processes draw the same.

        Args:
            number_of_pass: number of the pass, an int64 scalar.
            index: number of the example, an int64 scalar.
        """
        if self._map is not None:
            example = _call(self._map, example, "map")
        if self._augment is None:
            return example
        seed = {SEED: tf.stack([seed_of_pass(self._seed, number_of_pass), index])} if self._seeded else {}
        return _call(self._augment, example, "augment", **seed)


def _call(function: Callable[..., Any], example: Any, key: str, **by_name: Any) -> Any:
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
    """Return the functions that the config applies to each example of a split, or None without functions.

    Raises:
        ConfigError: there is no such function, or `map` takes `seed`.
    """
    keys = {key: reference for key in ("map", "augment") if (reference := getattr(config, key)) is not None}
    functions = {key: load_function(reference, ("data", key)) for key, reference in keys.items()}
    if "map" in functions and _takes_seed(functions["map"]):
        # the check of the config, which reads the code without running it, does not see through decorators
        raise ConfigError(Problem(("data", "map"), map_with_seed(_signature(functions["map"]))))
    augment = functions.get("augment") if training else None
    return ExampleMap(functions.get("map"), augment, seed) if augment is not None or "map" in functions else None


def num_threads(config: DataConfig) -> int:
    """Return the number of examples that a process reads and maps at the same time."""
    if config.threads is not None:
        return config.threads
    # one thread waits for each reader process
    return config.processes or num_cores()


def num_parallel_batches(config: DataConfig) -> int:
    """Return the number of batches that are made at the same time, which share the threads.

    With two batches, the threads of one can work while those of the other wait for its last example, and for the
    examples to be joined. With JPEG images on two threads, this saves a tenth of the time.
    """
    return 2 if num_threads(config) % 2 == 0 else 1


def batch_of(rows: Any, examples: tf.data.Dataset, one: Callable[..., Any], threads: int, began: tf.Tensor, *,
             skips: bool = False, at_once: int = 1) -> Batch:  # fmt: skip
    """Apply `one` to each example and return the results as a batch, in order; without examples, an empty batch.

    This is a dataset within the input pipeline, because `tf.map_fn` would process one example after the other.

    Args:
        rows: the row source; each of its rows belongs to one of `examples`.
        examples: arguments of `one` for each example.
        one: reads and maps one example.
        threads: number of threads for all batches together.
        began: result of `graph_clock.now` at the beginning of the batch.
        skips: whether to leave out examples for which `one` fails; otherwise the batch fails.
        at_once: number of batches that are made at the same time and share the threads.
    """
    made = examples.map(with_duration(one), num_parallel_calls=threads // at_once, deterministic=True)
    if skips:
        made = made.ignore_errors()
    batches = made.batch(tf.maximum(num_rows(rows), 1))
    none = tf.data.Dataset.from_tensors(tf.nest.map_structure(empty_value, batches.element_spec))
    batch, seconds = batches.concatenate(none).take(1).get_single_element()
    return add_batch_times(batch, seconds, began, at_once)


def first_failure(examples: Iterable[tuple[str, Any]], one: Callable[[Any], Any]) -> tuple[str, Exception] | None:
    """Return name and error of the first example for which `one` fails when it runs eagerly, or None.

    Args:
        examples: pairs of an example's name and the argument of `one`.
    """
    for name, example in examples:
        try:
            with tf.device("CPU:0"):
                one(example)
        except Exception as error:
            return name, error
    return None


def empty_value(spec: Any) -> Any:
    """Return a value of a batched spec with zero rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0], spec.dtype)
        rank = spec.shape.rank if spec.shape.rank is not None else 2
        return tf.RaggedTensor.from_nested_row_splits(values, [tf.zeros([1], tf.int64)] * (rank - 1))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 0 for size in spec.shape[1:])]
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if spec.dtype == tf.variant:
        return tf.stack([tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(0))])[:0]
    return tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype)


def unpack_arguments(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Adapt a function to `Dataset.map`, which passes the components of a tuple as arguments."""
    return lambda *components: function(pack(components))
