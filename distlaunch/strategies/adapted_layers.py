"""Values that layers learn by `adapt()` and that are not in variables.

Vocabularies and bin boundaries are stored in checkpoints. `Normalization` computes with constants, which are computed
again from its variables when these are restored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from distlaunch.patches.keras_private import layers_of
from distlaunch.strategies.state import State, StateMismatchError

ADAPTED = "adapted"
"""First part of the names of these values in checkpoints."""
_CACHE = "_distlaunch_vocabulary"


def adapted_state(model: keras.Model) -> State:
    """Return vocabularies, as the bytes of JSON lists, and bin boundaries, by name."""
    state = {}
    for name, layer in _named(model):
        if isinstance(layer, keras.layers.Discretization):
            state[name] = np.asarray(layer.bin_boundaries, np.float64)
        elif isinstance(layer, (keras.layers.StringLookup, keras.layers.IntegerLookup)):
            stored = _stored_vocabulary(layer)
            if stored is not None:
                state[name] = stored
    return state


def restore_adapted(model: keras.Model, state: State) -> None:
    """Restore the values of `adapted_state`. Call this before variables are restored, since it may replace some.

    Raises:
        StateMismatchError: a layer cannot use the stored vocabulary.
    """
    now = adapted_state(model)
    for name, layer in _named(model):
        if name not in state or (name in now and np.array_equal(now[name], state[name])):
            continue
        if isinstance(layer, keras.layers.Discretization):
            layer.bin_boundaries = state[name].tolist()
        elif isinstance(layer, (keras.layers.StringLookup, keras.layers.IntegerLookup)):
            _set_vocabulary(layer, json.loads(state[name].tobytes()))


def restore_constants(model: keras.Model, restored: Mapping[int, np.ndarray]) -> None:
    """Compute the constants of layers from their restored variables. Call this before a step is traced.

    Args:
        restored: the restored values, by the `id` of their variables.
    """
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.Normalization) and layer.built and layer.input_mean is None:
            variables = layer.adapt_mean, layer.adapt_variance
            # from host values, because the variables of a mesh are arrays on all of its devices
            values = [(one, keras.ops.convert_to_tensor(restored[id(one)], one.dtype)) for one in variables]
            with keras.StatelessScope(state_mapping=values):
                layer.finalize_state()
        elif getattr(layer, "output_mode", None) == "tf_idf" and hasattr(layer, "idf_weights"):
            layer.idf_weights_const = layer.idf_weights.value()


def changed_layers(before: State, model: keras.Model) -> list[str]:
    """Return the names of layers whose values differ from an earlier result of `adapted_values`."""
    now = adapted_values(model)
    return [
        name.split("/")[1]
        for name, value in now.items()
        if name in before and not (value.shape == before[name].shape and np.allclose(value, before[name], rtol=1e-5))
    ]


def adapted_values(model: keras.Model) -> State:
    """Return the values of `adapted_state`, and the statistics with which `Normalization` computes."""
    found = adapted_state(model)
    for name, layer in _named(model):
        if isinstance(layer, keras.layers.Normalization) and layer.mean is not None:
            parts = [keras.ops.convert_to_numpy(part) for part in (layer.mean, layer.variance)]
            found[name] = np.asarray(parts, np.float32)
    return found


def _named(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yield the layers that were adapted; values that were given as arguments belong to the model's function."""
    seen: dict[str, int] = {}
    for layer in {id(layer): layer for layer in layers_of(model)}.values():
        if isinstance(layer, keras.layers.Normalization):
            kind = "statistics" if layer.input_mean is None else ""
        elif isinstance(layer, keras.layers.Discretization):
            kind = "bin_boundaries" if layer.num_bins is not None and layer.bin_boundaries is not None else ""
        elif isinstance(layer, (keras.layers.StringLookup, keras.layers.IntegerLookup)):
            # a vocabulary from a file is not in `input_vocabulary`, and the file may change
            kind = "vocabulary" if layer.input_vocabulary is None else ""
        else:
            continue
        if kind:
            name = f"{ADAPTED}/{layer.name}/{kind}"
            seen[name] = seen.get(name, 0) + 1
            yield name if seen[name] == 1 else f"{name}#{seen[name]}", layer


def _stored_vocabulary(layer: Any) -> np.ndarray | None:
    """Return a vocabulary in the form of `adapted_state`; None if it is not text that JSON can hold."""
    table = layer.lookup_table
    known = getattr(layer, _CACHE, None)
    if known is not None and known[0] is table:
        return known[1]
    try:
        terms = layer.get_vocabulary()
    except UnicodeDecodeError:
        return None
    text = json.dumps([term if isinstance(term, str) else int(term) for term in terms])
    array = np.frombuffer(text.encode(), np.uint8)
    # kept, because a large table takes long to read; `adapt` and `set_vocabulary` make new tables
    object.__setattr__(layer, _CACHE, (table, array))
    return array


def _set_vocabulary(layer: Any, terms: list[Any]) -> None:
    # the weights of terms are a variable, whose values are restored later
    weights = {"idf_weights": np.ones(len(terms), np.float32)} if layer.output_mode == "tf_idf" else {}
    size = layer.vocabulary_size()
    try:
        layer.set_vocabulary(terms, **weights)
    except (RuntimeError, ValueError):
        raise StateMismatchError(
            f"the layer '{layer.name}' was saved with a vocabulary of {len(terms)} terms, but now has {size}"
        ) from None
