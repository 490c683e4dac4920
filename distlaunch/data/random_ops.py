"""Finds random operations without a seed in data functions; their numbers differ by process and after a resume."""

from __future__ import annotations

from typing import Any

from distlaunch.base.plural import listed
from distlaunch.config.run import Data as DataConfig
from distlaunch.data.batches import pack
from distlaunch.data.preprocessing import Preprocessing
from distlaunch.data.split import Split
from distlaunch.data.splits import Splits
from distlaunch.patches.tensorflow_late import is_a, tf
from distlaunch.patches.tensorflow_shuffle import shuffles_of

RANDOM_OPS = frozenset(
    {
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"),
        *("RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial", "ParameterizedTruncatedNormal"),
        *("RandomCrop", "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"),
    }
)
"""TensorFlow's operations that draw from a stream of random numbers; operations named Stateless... take a seed."""


def operations(graph: Any) -> set[str]:
    """Return the names of all operations of a GraphDef, including those of its functions."""
    bodies = (graph.node, *(function.node_def for function in graph.library.function))
    return {node.op for nodes in bodies for node in nodes}


def random_warnings(config: DataConfig, train: Split, preprocessing: Preprocessing | None) -> list[str]:
    """Return warnings about `data.map` and `data.augment` if they draw random numbers without a seed.

    Another warning is about layers of `data.preprocessing` that would draw in training only.

    Args:
        train: the split for training.
    """
    found: list[str] = []
    if preprocessing is not None and (names := preprocessing.random_layers()):
        what = f"data.preprocessing: {listed(names)} change nothing, because the layer also computes for validation"
        found.append(f"{what}, predictions and exports; move them into the model, or use `data.augment`")
    # functions run eagerly for debugging, and cannot be traced then
    if (config.map is None and config.augment is None) or tf.config.functions_run_eagerly():
        return found
    if config.map is not None and (drawn := _random_ops_in(train.unaugmented)):
        what = f"data.map: {config.map} draws random numbers ({drawn}), also in validation, `evaluate` and `predict`"
        hint = "move random operations to `data.augment`, which is used for training only and takes `seed`"
        found.append(f"{what}; {hint}")
    elif config.augment is not None and (drawn := _random_ops_in(train)):
        what = f"data.augment: {config.augment} draws random numbers ({drawn}) that cannot be reproduced"
        hint = "take the argument `seed` and use `tf.random.stateless_...` with it, so that the examples are the same"
        found.append(f"{what}; {hint} in a resumed run and with another number of workers")
    return found


def overlap_warnings(splits: Splits) -> list[str]:
    """Return a warning if both splits are parts of one pipeline that shuffles the examples in each pass."""
    train: Any = splits.train
    validation: Any = splits.validation
    if not is_a(train, "data.Dataset") or not is_a(validation, "data.Dataset"):
        return []
    if not shuffles_of(train).share(shuffles_of(validation)):
        return []
    what = "training and validation data are parts of one `.shuffle()`, which changes the order in each pass"
    hint = "write `.shuffle(..., reshuffle_each_iteration=False)`"
    return [f"data: {what}, so validation uses training examples; {hint}"]


def _random_ops_in(split: Split) -> str:
    sample: Any = split.sample(1)
    spec = sample.element_spec
    # traced without the pipeline, because its arrays would become constants in the graph
    function = tf.function(lambda *element: split.load(pack(element), raw=True), autograph=False)
    traced = function.get_concrete_function(*(spec if isinstance(spec, tuple) else (spec,)))
    return ", ".join(sorted(operations(traced.graph.as_graph_def()) & RANDOM_OPS))
