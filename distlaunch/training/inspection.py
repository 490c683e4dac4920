"""Finds what in a model and its data may make a strategy's numbers differ from those of one device."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from distlaunch.config.run import RunConfig
from distlaunch.strategies.module_model import parts_of
from distlaunch.strategies.protocol import Source
from distlaunch.strategies.replica_input import pack
from distlaunch.trials import ModelFacts

_RANDOM_OPS = frozenset(
    {
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"),
        *("RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial", "ParameterizedTruncatedNormal"),
        *("RandomCrop", "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"),
    }
)
"""TensorFlow's operations that keep a stream of random numbers; those named Stateless... are functions of a seed."""


_SHARDING_OP = "ShardDataset"


def facts_of(config: RunConfig, model: keras.Model, source: Source) -> ModelFacts:
    """What to know of a model on one device, which has its first weights, and of its training data."""
    return ModelFacts(
        batch_norm=[layer.name for layer in model._flatten_layers() if _normalises_alone(layer)],
        own_batch_norm=sorted({type(part).__name__ for part in parts_of(model) if _seems_batch_norm(part)}),
        embeddings=[layer.name for layer in model._flatten_layers() if _is_embedding(layer)],
        random=[layer.name for layer in model._flatten_layers() if _draws(layer)],
        own_step=_own_step(config, model),
        random_ops=sorted(_pipeline_ops(source) & _RANDOM_OPS),
        own_losses=float(sum(float(loss) for loss in model.losses)),
    )


def takes_shards(source: Source) -> bool:
    """Whether a pipeline takes a part of the examples by itself."""
    return _SHARDING_OP in _pipeline_ops(source)


def _normalises_alone(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized and layer.trainable


def _is_embedding(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Embedding) and layer.trainable


def _seems_batch_norm(part: Any) -> bool:
    cls = type(part)
    return "batchnorm" in cls.__name__.lower().replace("_", "") and not cls.__module__.startswith("keras.")


def _draws(layer: Any) -> bool:
    """Whether it draws random numbers in training; a Dropout of rate 0 does not."""
    own = [value for value in vars(layer).values() if isinstance(value, keras.random.SeedGenerator)]
    return bool(own or getattr(layer, "_seed_generators", None)) and getattr(layer, "rate", None) != 0


def _own_step(config: RunConfig, model: keras.Model) -> str:
    if config.train.step is not None:
        return str(config.train.step)
    own = config.train.loop == "fit" and type(model).train_step is not keras.Model.train_step
    return f"{type(model).__name__}.train_step" if own else ""


def _pipeline_ops(source: Source) -> set[str]:
    """Names of the operations in the pipeline's graph."""
    loaded: Any = source.elements.map(lambda *element: source.load(pack(element)))
    graph = tf.compat.v1.GraphDef.FromString(loaded._as_serialized_graph().numpy())
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.op for node in nodes}
