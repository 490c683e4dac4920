"""Puts a class of overrides between one object of Keras and its class."""

from __future__ import annotations

from typing import Any

from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(
        Symbol("keras.Layer.__call__", "(self, *args, **kwargs)"),
        Symbol("keras.Model.metrics"),
        Symbol("keras.optimizers.Optimizer.apply", "(self, grads, trainable_variables=None)"),
        Symbol("keras.optimizers.Optimizer.stateless_apply", "(self, optimizer_variables, grads, trainable_variables)"),
    ),
    why="`verify` records what the layers and optimizers of the user's own model compute, and switches single layers "
    "out of training, without a change to the model.",
    until="Keras calls hooks around a layer's call and an optimizer's update.",
)


def between(part: Any, base: type) -> None:
    """Puts a class between an object and its class; what it is called stays."""
    PATCH.check()
    cls = type(part)
    part.__class__ = type(cls.__name__, (base, cls), {"__module__": cls.__module__})
