"""Records the outputs of each layer in a step, in a form that can be added up over replicas and meshes.

The facts are sums over the values of a batch, kept in a metric of the model: every strategy sums metrics over its
replicas, and passes them through functional steps.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops, tree

from distlaunch.patches.keras_overrides import insert_class
from distlaunch.patches.keras_private import layers_directly_in
from distlaunch.strategies.module_model import ModuleModel
from distlaunch.strategies.state import State
from distlaunch.strategies.variables import named_metrics

_FACTS = 5
_OPAQUE_LAYERS = (keras.layers.RNN, keras.layers.Wrapper)
"""Layers that may call their sublayers in a loop, in which nothing can be recorded."""


class LayerFacts(keras.metrics.Metric):
    """Sums over the outputs of each layer since the last reset.

    Create it under the strategy's scope, before a step is traced.

    Attributes:
        order: names of the layers in the order in which they were first computed.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name="layer_facts")
        self.order: list[str] = []
        self._model, self._variable_of_layer = model, {}
        for part in _recorded_layers(model):
            name = _unused_name(_name(part), self._variable_of_layer)
            self._variable_of_layer[name] = self.add_variable(
                (_FACTS,), "zeros", name=f"layer_facts_{len(self._variable_of_layer)}"
            )
            insert_class(part, _RecordsOutputs)
            object.__setattr__(part, "_distlaunch_record", self._make_recorder(name))
        insert_class(model, _WithFacts)
        # Keras's own `__setattr__` would track the metric, which `_WithFacts` lists already
        object.__setattr__(model, "_distlaunch_facts", self)

    def _make_recorder(self, name: str) -> Any:
        def record(outputs: Any) -> None:
            leaves = [leaf for leaf in tree.flatten(outputs) if _has_numbers(leaf)]
            if not leaves:
                return
            if name not in self.order:
                self.order.append(name)
            self._variable_of_layer[name].assign_add(sum(_facts(leaf) for leaf in leaves))

        return record

    def read(self, snapshot: State) -> dict[str, list[float]]:
        """Return the facts of each layer in the order of computation."""
        names = {id(variable): name for name, variable in named_metrics(self._model).items()}
        found = {name: snapshot[names[id(self._variable_of_layer[name])]] for name in self.order}
        return {name: [float(fact) for fact in facts] for name, facts in found.items()}

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the layers record their outputs themselves."""

    def result(self) -> dict[str, Any]:
        """Return no values: the facts are not shown among the model's metrics."""
        return {}


class _RecordsOutputs:
    """Class inserted between a layer and its class: records the outputs."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._distlaunch_record(outputs)
        return outputs


class _WithFacts:
    """Class inserted between a model and its class: adds the facts to `metrics`, which may be a fixed list."""

    @property
    def metrics(self: Any) -> list[Any]:
        return [*super().metrics, self._distlaunch_facts]  # pyright: ignore[reportAttributeAccessIssue]


def _recorded_layers(model: keras.Model) -> list[Any]:
    """Return the layers to record, including those within the user's own layers, or the modules of a `tf.Module`."""
    if isinstance(model, ModuleModel):
        return [module for module in model.module.submodules if callable(module)]
    return list({id(part): part for part in _sublayers(model)}.values())


def _sublayers(layer: keras.Layer) -> list[Any]:
    found = []
    for part in layers_directly_in(layer):
        is_model = isinstance(part, keras.Model)
        if not is_model and not isinstance(part, keras.layers.InputLayer):
            found.append(part)
        if is_model or not (type(part).__module__.startswith("keras.") or isinstance(part, _OPAQUE_LAYERS)):
            found += _sublayers(part)
    return found


def _name(part: Any) -> str:
    return part.name if isinstance(part.name, str) else type(part).__name__


def _unused_name(name: str, taken: dict[str, Any]) -> str:
    number = 1
    while (free := name if number == 1 else f"{name}#{number}") in taken:
        number += 1
    return free


def _has_numbers(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and keras.backend.is_float_dtype(leaf.dtype) and len(leaf.shape) > 0


def _facts(values: Any) -> Any:
    """Return the count, sum, sum of magnitudes, sum of squares, and sum of the squares of a projection of each row.

    Normalized outputs always have the same mean and squares; the projection shows their differences.
    """
    # sums of squares overflow in float16
    values = ops.cast(values, "float32")
    projected = values
    if len(values.shape) > 1 and values.shape[-1] is not None:
        # the same weights in every process and trial
        weights = np.cos(np.arange(1, values.shape[-1] + 1)).astype(np.float32)
        projected = ops.sum(values * weights, axis=-1)
    parts = (ops.ones_like(values), values, ops.abs(values), ops.square(values), ops.square(projected))
    return ops.stack([ops.sum(part) for part in parts])
