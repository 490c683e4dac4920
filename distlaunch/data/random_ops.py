"""Random numbers of TensorFlow's own stream in a graph: others in each process, and after a resume."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import pack
from distlaunch.data.split import Split
from distlaunch.data.splits import Splits
from distlaunch.patches.tensorflow_shuffle import shuffles_of

RANDOM_OPS = frozenset(
    {
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"),
        *("RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial", "ParameterizedTruncatedNormal"),
        *("RandomCrop", "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"),
    }
)
"""TensorFlow's operations that keep a stream of random numbers; those named Stateless... are functions of a seed."""


def operations(graph: Any) -> set[str]:
    """Return the names of all operations of a GraphDef, those of its functions included."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    return {node.op for nodes in bodies for node in nodes}


def random_warnings(config: DataConfig, train: Split) -> list[str]:
    """Return what is to be said about `data.map` and `data.augment` that draw without a seed.

    Args:
        train: the split for training.
    """
    found: list[str] = []
    if tf.config.functions_run_eagerly():  # someone debugs, line by line
        return found
    if config.map is not None and (drawn := _drawn(train.unaugmented)):
        what = f"data.map: {config.map} draws random numbers ({drawn}), in validation, `evaluate` and `predict` too"
        hint = "write what is random as `data.augment`, which is for training only and takes `seed`"
        found.append(f"{what}; {hint}")
    elif config.augment is not None and (drawn := _drawn(train)):
        what = f"data.augment: {config.augment} draws random numbers ({drawn}) that nobody can draw again"
        hint = "take the argument `seed` and use `tf.random.stateless_...` with it, so that a resumed run, and one with"
        found.append(f"{what}; {hint} other workers, sees the same examples")
    return found


def overlap_warnings(splits: Splits) -> list[str]:
    """Return what is to be said about splits that are parts of one pipeline which orders the examples anew."""
    train, validation = splits.train, splits.validation
    if not isinstance(train, tf.data.Dataset) or not isinstance(validation, tf.data.Dataset):
        return []
    if not shuffles_of(train).share(shuffles_of(validation)):
        return []
    what = "training and validation data are parts of one `.shuffle()`, which orders the examples anew in each pass"
    hint = "write `.shuffle(..., reshuffle_each_iteration=False)`"
    return [f"data: {what}, so validation sees examples of training; {hint}"]


def _drawn(split: Split) -> str:
    sample: Any = split.sample(1)
    spec = sample.element_spec
    # traced alone: with the pipeline, arrays would stand as constants in the graph
    function = tf.function(lambda *element: split.load(pack(element), raw=True), autograph=False)
    traced = function.get_concrete_function(*(spec if isinstance(spec, tuple) else (spec,)))
    return ", ".join(sorted(operations(traced.graph.as_graph_def()) & RANDOM_OPS))
