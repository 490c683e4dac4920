"""A split that consists of streams. Each stream gives an equal part of every global batch, in the streams' order.

A batch depends on the number of streams only. Workers that each read some of the streams have the same batches as one
process that reads all streams. When some streams have ended, the remaining batches of a pass are smaller.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import Batch, Index, num_rows, pack
from distlaunch.data.context import StreamContext
from distlaunch.data.examples.each_example import ExampleMap, unpack_arguments
from distlaunch.data.sources.pipelines import Pipeline
from distlaunch.data.split import Batching, Split
from distlaunch.data.splits import StreamData
from distlaunch.patches.tensorflow_late import tf

_ZERO = np.int64(0)


class Streams(Split):
    """A split that consists of the streams of this process, which have consecutive indices.

    Args:
        seed: seed of the order of each pass; None for the streams' order.
        name: `training` or `validation`, for messages.

    Raises:
        ConfigError: a stream has no examples, or examples of another shape than the others.
    """

    def __init__(
        self, data: StreamData, config: DataConfig, example_map: ExampleMap | None, seed: int | None, name: str
    ) -> None:
        part = config.model_copy(update={"global_batch": config.batch // data.number})
        self._pipelines = {
            stream: Pipeline(dataset, part, None, example_map, seed, drop=False,
                             stream=StreamContext(data.number, stream))
            for stream, dataset in data.streams.items()
        }  # fmt: skip
        self._number = data.number
        self._check_streams(name, mapped=example_map is not None)
        parts = list(self._pipelines.values())
        lengths, examples = [part.num_batches for part in parts], [part.num_examples for part in parts]
        known = None not in lengths
        self.num_examples = sum(number or 0 for number in examples) if known else None
        self.num_batches = max(number or 0 for number in lengths) if known else None
        self.global_batch = sum(part.global_batch or 0 for part in parts) or None
        self.endless = any(part.endless for part in parts)
        self.empty, self.at_once, self.threads = parts[0].empty, parts[0].at_once, parts[0].threads
        self.work = parts[0].work

    def _check_streams(self, name: str, *, mapped: bool) -> None:
        """Raise ConfigError if a stream is empty, or has examples of another shape.

        A worker whose streams are all empty would have no row to use as a stand-in. No stream may be empty, so that it
        does not matter which worker reads which stream.
        """
        first: tuple[int, Any] | None = None
        for stream, pipeline in self._pipelines.items():
            if not pipeline.head:
                message = (
                    f"stream {stream} of {self._number} has no {name} examples, but each stream needs at least one"
                )
                hint = "use fewer streams, or divide the examples of all files with "
                hint += "`.shard(context.num_streams, context.stream)`"
                raise ConfigError(Problem(("data", "streams"), f"{message}; {hint}"))
            shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(pipeline.head[0], expand_composites=True)]
            first = first or (stream, shapes)
            # with a map or ragged batches, shapes may differ
            ragged = not all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(pipeline.head[0]))
            if shapes != first[1] and not mapped and not ragged:
                message = f"the {name} examples of stream {stream} have the shapes {shapes}"
                raise ConfigError(Problem(("data",), f"{message}, but those of stream {first[0]} have {first[1]}"))

    def sample(self, number: int) -> tf.data.Dataset:
        return next(iter(self._pipelines.values())).sample(number)

    def batching(self) -> Batching | None:
        return next(iter(self._pipelines.values())).batching()

    def buffer(self) -> tuple[int, int]:
        held = [part.buffer() for part in self._pipelines.values()]
        return sum(examples for examples, _ in held), sum(num_bytes for _, num_bytes in held)

    def batches(self, number_of_pass: Index, start: Index) -> tf.data.Dataset:
        def until_all_end(part: Split) -> tf.data.Dataset:
            # `zip` ends with the shortest dataset, so a stream that has ended continues without rows
            ends = tf.data.Dataset.from_tensors(part.empty).repeat()
            return part.batches(number_of_pass, start).concatenate(ends)

        joined = self._zip_streams([until_all_end(part) for part in self._pipelines.values()])
        return joined.take_while(unpack_arguments(lambda rows: num_rows(rows) > 0))

    def endless_batches(self) -> tf.data.Dataset:
        """Return endless row sources in which each stream is repeated separately.

        A process does not know when the passes of other processes' streams end.
        """

        def passes(part: Split) -> tf.data.Dataset:
            return tf.data.Dataset.range(np.iinfo(np.int64).max).flat_map(lambda number: part.batches(number, _ZERO))

        return self._zip_streams([passes(part) for part in self._pipelines.values()])

    @staticmethod
    def _zip_streams(parts: list[tf.data.Dataset]) -> tf.data.Dataset:
        def join(*elements: Any) -> Any:
            return tf.nest.map_structure(_concatenate, *map(pack, elements))

        return tf.data.Dataset.zip(tuple(part.map(lambda *rows: (pack(rows),)) for part in parts)).map(join)

    def read(self, rows: Any, *, at_once: int = 1) -> Batch:
        return next(iter(self._pipelines.values())).read_with(self._first_failure, rows, at_once)

    def _first_failure(self, keys: np.ndarray) -> tuple[str, Exception] | None:
        found = (pipeline.first_failure(keys) for pipeline in self._pipelines.values())
        return next((failure for failure in found if failure is not None), None)

    def fingerprint(self) -> str:
        described = {stream: json.loads(part.describe()) for stream, part in self._pipelines.items()}
        first = next(iter(described.values()))
        parts = {f"stream {stream}": list(facts["examples"].values()) for stream, facts in described.items()}
        shared = {"types": first["types"], "shuffle": first["shuffle"]}
        return json.dumps({"streams": self._number, **shared, "parts": parts})


def _concatenate(*leaves: Any) -> Any:
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    if leaves[0].dtype != tf.variant:
        return tf.concat(leaves, 0)
    # TensorFlow has no operation that concatenates variants, but datasets can do it
    slices = [tf.data.Dataset.from_tensor_slices(leaf) for leaf in leaves]
    rows = functools.reduce(lambda one, other: one.concatenate(other), slices)
    total = tf.add_n([num_rows(leaf) for leaf in leaves])
    none = tf.data.Dataset.from_tensors(leaves[0][:0])
    return rows.batch(tf.maximum(total, 1)).concatenate(none).take(1).get_single_element()
