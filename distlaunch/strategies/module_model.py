"""Wraps a `tf.Module` in a Keras model, so that every TensorFlow strategy can train it.

Each `tf.Variable` of the module is replaced by a Keras variable with the same value. The name of the Keras variable
consists of the attributes that lead to it, such as `dense1/weight`. The module's own code computes the outputs.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np

from distlaunch.patches.keras_private import layers_of, put_path
from distlaunch.patches.tensorflow_late import tf
from distlaunch.patches.tensorflow_private import attributes_of, find_in


class ModuleModel(keras.Model):
    """Keras model that calls a module on the inputs of a batch.

    Args:
        module: a module whose `__call__` takes the inputs and, if it has this argument, `training`. It must have
            created its variables already.

    Attributes:
        module: the module, with Keras variables in place of its `tf.Variable`s.
    """

    def __init__(self, module: tf.Module) -> None:
        super().__init__(name=f"{type(module).__name__.lower()}_module")
        self.module: Any = module
        self._takes_training = "training" in inspect.signature(self.module).parameters
        self._variables_of_module = _replace_variables(module)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        # Keras passes None as the default; plain Python code of a module expects a bool
        return self.module(inputs, training=bool(training)) if self._takes_training else self.module(inputs)


def layers_and_modules(model: keras.Model) -> list[Any]:
    """Return a model's layers, including itself, and the modules of a `tf.Module`."""
    modules = [model.module, *model.module.submodules] if isinstance(model, ModuleModel) else []
    return [*layers_of(model), *modules]


def _replace_variables(module: tf.Module) -> list[keras.Variable]:
    """Replace the module's variables by Keras variables; a variable in several places gets a single replacement."""
    made: dict[int, keras.Variable] = {}
    # listed before anything is replaced
    found = find_in(module, lambda leaf: isinstance(leaf, tf.Variable))
    paths = {id(variable): path for path, variable in reversed(list(found))}  # the first path is the name

    def replacement(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Variable):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _keras_variable(leaf, [str(part) for part in paths[id(leaf)]])
        return made[id(leaf)]

    for part in [module, *module.submodules]:
        for name, value in list(attributes_of(part)):
            if any(isinstance(leaf, tf.Variable) for leaf in tf.nest.flatten(value)):
                setattr(part, name, tf.nest.map_structure(replacement, value))
    return list(made.values())


def _keras_variable(variable: tf.Variable, path: list[str]) -> keras.Variable:
    made = keras.Variable(
        initializer=np.asarray(variable.numpy()),
        dtype=variable.dtype.name,
        trainable=variable.trainable,
        name=path[-1],
    )
    put_path(made, "/".join(path))
    return made
