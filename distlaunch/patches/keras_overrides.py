"""Inserts a class of overrides between a Keras object and its class."""

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
    why="`verify` records the results of layers and optimizers in the user's model, and switches training off for "
    "single layers, without changing the model.",
    until="Keras calls hooks around a layer's call and an optimizer's update.",
)


def insert_class(part: Any, base: type) -> None:
    """Insert the class `base` between an object and its class; the object's new class has the name of the old one."""
    PATCH.check()
    cls = type(part)
    part.__class__ = type(cls.__name__, (base, cls), {"__module__": cls.__module__})
