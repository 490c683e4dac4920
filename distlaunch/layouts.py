"""Layouts that the code of a model, rather than the config, gives to layers."""

from __future__ import annotations

from typing import TypeVar

Layer = TypeVar("Layer")
ATTRIBUTE = "_distlaunch_layout"


def with_layout(layer: Layer, **axes: list[str | None]) -> Layer:
    """Set how a layer's variables are split over the mesh axes of `dtensor` and `jax`; other strategies ignore it.

    A rule of the config's `strategy.layout` that matches a variable comes first. An axis that the mesh does not have
    splits nothing, so the same model can be used on every mesh.

    Args:
        layer: a Keras layer, or a `tf.Module`.
        axes: for each attribute of the layer that is a variable, the mesh axis of each dimension; None for a dimension
            that is not split.

    Returns:
        The layer itself: `with_layout(keras.layers.Dense(64), kernel=[None, "model"], bias=["model"])`.
    """
    setattr(layer, ATTRIBUTE, {name: tuple(value) for name, value in axes.items()})
    return layer
