"""Checks, before the first step, that a model's outputs and the labels are what its loss expects.

Keras gives no warning when a loss for probabilities gets other values. On JAX, it does not warn either when a label is
outside the range of the model's outputs. Here, values that cannot be right raise an error, and values that may be
intended give a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.patches.keras_private import is_functional, origin_of
from distlaunch.patches.tensorflow_late import is_a

Key = tuple[str | int, ...]
_PROBABILITY_TOLERANCE = 1e-3
"""Amount by which probabilities may be below 0 or above 1, because they may have been computed in 16 bits."""
SPARSE, CATEGORICAL, BINARY, DIFFERENCE = "sparse", "categorical", "binary", "difference"
_KINDS = {
    "sparse_categorical_crossentropy": SPARSE,
    "categorical_crossentropy": CATEGORICAL,
    "categorical_focal_crossentropy": CATEGORICAL,
    "binary_crossentropy": BINARY,
    "binary_focal_crossentropy": BINARY,
    "mean_squared_error": DIFFERENCE,
    "mean_absolute_error": DIFFERENCE,
    "huber": DIFFERENCE,
    "log_cosh": DIFFERENCE,
}
_LAYERS_WITH_ACTIVATION = (
    *(keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Activation),
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
)
_VALUE_PRESERVING_LAYERS = (keras.layers.Reshape, keras.layers.Flatten, keras.layers.Dropout, keras.layers.Permute)


_PROBABILITIES = (keras.activations.softmax, keras.activations.sigmoid)


@dataclass(frozen=True)
class LabelPlace:
    """Position of an array in the structure of the labels; its key is None if the labels are a single array."""

    key: str | int | None

    def of(self, y: Any) -> Any:
        return y if self.key is None else y[self.key]


@dataclass(frozen=True)
class KnownLoss:
    """A loss of Keras, identified by the name of its function."""

    name: str
    from_logits: bool = False
    ignore_class: int | None = None

    @property
    def kind(self) -> str:
        return _KINDS[self.name]


@dataclass(frozen=True)
class LossInputs:
    """A loss with the labels and predictions that it compares.

    Attributes:
        output: name of the model's output; empty if there is only one.
        place: position in the structure of the labels.
        labels: labels of some rows, as a host array.
        predictions: predictions for the same rows, as a host array.
    """

    output: str
    loss: KnownLoss
    place: LabelPlace
    labels: np.ndarray
    predictions: np.ndarray

    @property
    def num_classes(self) -> int:
        return self.predictions.shape[-1]


def check_loss(model: keras.Model, y: Any, predictions: Any, key: Key, warn: Callable[[str], None]) -> None:
    """Check the labels and predictions that the compiled losses get.

    Args:
        y: labels of some rows.
        predictions: predictions for the same rows.
        key: the config key that names the loss.
        warn: called with warnings.

    Raises:
        ConfigError: labels or predictions cannot be what a loss expects.
    """
    problems = []
    for inputs in loss_inputs(model, y, predictions):
        where = f"output '{inputs.output}': " if inputs.output else ""
        if wrong := _wrong_shape(inputs) or _why_not_probabilities(inputs, model):
            problems.append(Problem(key, f"{where}{wrong}"))
        elif suspicion := _suspicion(inputs, model):
            warn(f"{'.'.join(map(str, key))}: {where}{suspicion}")
    if problems:
        raise ConfigError(problems)


def loss_inputs(model: keras.Model, y: Any, predictions: Any) -> Iterator[LossInputs]:
    """Yield each of Keras's own losses with its labels and predictions; skip losses whose inputs are not clear."""
    names = list(getattr(model, "output_names", None) or [])
    for output, loss, at, tensor in _match_outputs(getattr(model, "loss", None), label_places(y), predictions, names):
        labels, known = at.of(y), known_loss(loss)
        if known is None or is_a(labels, "RaggedTensor", "SparseTensor"):
            continue
        if hasattr(labels, "shape") and hasattr(tensor, "shape") and len(tensor.shape) > 1:
            values = np.asarray(keras.ops.convert_to_numpy(tensor), np.float32)
            yield LossInputs(output, known, at, np.asarray(labels), values)


def label_places(y: Any) -> Any:
    """Return the structure of the labels with places instead of arrays, or None if it is nested more deeply."""
    if isinstance(y, Mapping):
        made: Any = {name: LabelPlace(name) for name in y}
    elif isinstance(y, (list, tuple)):
        made = [LabelPlace(index) for index in range(len(y))]
    else:
        return LabelPlace(None)
    parts = y.values() if isinstance(y, Mapping) else y
    return None if any(isinstance(part, (Mapping, list, tuple)) for part in parts) else made


def _match_outputs(loss: Any, y: Any, predictions: Any, names: list[str]) -> list[tuple[str, Any, LabelPlace, Any]]:
    """Return tuples of output, loss, place of the labels, and predictions; empty if they cannot be matched."""
    if isinstance(predictions, (list, tuple)):
        if len(predictions) != len(names) or not isinstance(y, (list, dict)):
            return []
        losses = dict(zip(names, loss, strict=False)) if isinstance(loss, (list, tuple)) else loss
        labels = y if isinstance(y, dict) else dict(zip(names, y, strict=False))
        return _match_outputs(losses, labels, dict(zip(names, predictions, strict=True)), names)
    if isinstance(predictions, Mapping):
        if not isinstance(y, dict) or isinstance(loss, (list, tuple)):
            return []
        losses = loss if isinstance(loss, Mapping) else dict.fromkeys(predictions, loss)
        common = [name for name in predictions if name in y and losses.get(name) is not None]
        return [(name, losses[name], y[name], predictions[name]) for name in common]
    if isinstance(loss, Mapping) and len(loss) == 1:
        loss = next(iter(loss.values()))
    plain = isinstance(y, LabelPlace) and loss is not None and not isinstance(loss, (Mapping, list, tuple))
    return [("", loss, y, predictions)] if plain else []


def known_loss(loss: Any) -> KnownLoss | None:
    """Return the description of a compiled loss, or None if it is not one of Keras's losses that are checked."""
    options: Mapping[str, Any] = {}
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if isinstance(loss, functools.partial):
        loss, options = loss.func, loss.keywords
    # a class written by the user may have the same name and compute something else
    if isinstance(loss, keras.losses.Loss) and type(loss).__module__.startswith("keras."):
        options, loss = loss.get_config(), getattr(loss, "fn", None)
    name = getattr(loss, "__name__", "")
    if name not in _KINDS or not getattr(loss, "__module__", "").startswith("keras."):
        return None
    return KnownLoss(name, bool(options.get("from_logits", False)), options.get("ignore_class"))


def _wrong_shape(inputs: LossInputs) -> str:
    labels, predictions, name = inputs.labels, inputs.predictions, inputs.loss.name
    is_one_per_row = labels.ndim == predictions.ndim - 1 or (labels.ndim == predictions.ndim and labels.shape[-1] == 1)
    shapes = f"the labels have shape {shape_text(labels)}, the model's outputs {shape_text(predictions)}"
    many = inputs.num_classes > 1
    match inputs.loss.kind:
        case "sparse" if many and labels.shape == predictions.shape:
            return f"{name} takes class numbers, but {shapes} (one-hot); use categorical_crossentropy"
        case "sparse" if not is_one_per_row:
            return f"{name} takes one class number for each prediction, but {shapes}"
        case "categorical" if not many:
            return f"{name} of one output is always 0; use binary_crossentropy, or an output for each class"
        case "categorical" if is_one_per_row:
            return f"{name} takes one-hot labels, but {shapes}; use sparse_categorical_crossentropy"
        case "categorical" if labels.shape != predictions.shape:
            return f"{name} takes one-hot labels of the outputs' shape, but {shapes}"
        case "binary" if many and is_one_per_row:
            return f"{name} takes a label for each output, but {shapes}; use sparse_categorical_crossentropy"
        case "difference" if many and labels.ndim == predictions.ndim - 1:
            return f"{name} compares values of the same shape, but {shapes}; end the model with one unit"
    return ""


def _why_not_probabilities(inputs: LossInputs, model: keras.Model) -> str:
    loss, values = inputs.loss, inputs.predictions
    if loss.kind == DIFFERENCE or loss.from_logits:
        return ""
    activation = "sigmoid" if loss.kind == BINARY else "softmax"
    hint = f"end the model with activation='{activation}', or use a loss with {{from_logits: true}}"
    layer = _last_layer(model, inputs)
    if layer is not None and _activation_of(layer) is keras.activations.linear:
        return f"{loss.name} takes probabilities, but the last layer, '{layer.name}', has no activation; {hint}"
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    # values above 1 are valid for one-hot labels, where Keras divides the outputs by their sum
    if low < -_PROBABILITY_TOLERANCE or (high > 1 + _PROBABILITY_TOLERANCE and loss.kind != CATEGORICAL):
        return f"{loss.name} takes probabilities, but the model's outputs go from {low:.3g} to {high:.3g}; {hint}"
    return ""


def _suspicion(inputs: LossInputs, model: keras.Model) -> str:
    loss, labels = inputs.loss, inputs.labels
    if loss.kind == BINARY and (float(labels.min(initial=0)) < 0 or float(labels.max(initial=0)) > 1):
        return f"{loss.name} takes labels from 0 to 1, but got others, such as {_first_outside_unit_interval(labels)}"
    if loss.from_logits and (evidence := _evidence_of_probabilities(model, inputs)):
        hint = "write {from_logits: false} for the loss, or leave the softmax or sigmoid out of the model"
        return f"{loss.name} with from_logits=true takes logits, but {evidence}; {hint}"
    return ""


def _evidence_of_probabilities(model: keras.Model, inputs: LossInputs) -> str:
    """Return the evidence, in words, that the outputs are probabilities; empty if there is none."""
    layer = _last_layer(model, inputs)
    if layer is not None and (activation := _activation_of(layer)) in _PROBABILITIES:
        return f"the last layer, '{layer.name}', computes probabilities ({activation.__name__})"
    values = inputs.predictions
    # logits of several classes are hardly ever positive numbers that add up to 1 in every row
    several = inputs.loss.kind in (SPARSE, CATEGORICAL) and inputs.num_classes > 1 and values.size > 0
    if several and values.min() >= 0 and np.allclose(values.sum(-1), 1, atol=_PROBABILITY_TOLERANCE):
        return "the model's outputs are probabilities, which add up to 1"
    return ""


def _activation_of(layer: Any) -> Any:
    """Return the activation of a layer that `_last_layer` returned."""
    return keras.activations.softmax if type(layer) is keras.layers.Softmax else layer.activation


def _first_outside_unit_interval(labels: np.ndarray) -> Any:
    return labels[(labels < 0) | (labels > 1)].flat[0]


def _last_layer(model: keras.Model, inputs: LossInputs) -> Any | None:
    """Return the layer whose activation produces the predictions, or None if that is not certain."""
    if inputs.output:
        return None
    layer: Any = model.layers[-1] if isinstance(model, keras.Sequential) and model.layers else None
    if layer is None and is_functional(model):
        layer = origin_of(model.outputs[0])
    # these layers change no value, so the activation is that of the previous layer
    while layer is not None and type(layer) in _VALUE_PRESERVING_LAYERS:
        layer = origin_of(layer.input)
    # `type` and not `isinstance`: a derived class may compute anything
    return layer if type(layer) in (*_LAYERS_WITH_ACTIVATION, keras.layers.Softmax) else None


def shape_text(value: Any) -> str:
    """Format shapes such as `[rows, 10]`, by name if there are several arrays; the first dimension is `rows`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {shape_text(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(shape_text, value))})"
    return f"[{', '.join(['rows', *map(str, np.shape(value)[1:])])}]"
