"""An exported model as a function from named input arrays to named output arrays; without TensorFlow or Keras.

Imports nothing of distlaunch, for the reason in `exported.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ENDPOINT = "serve"
ANY = "any"
"""The type of inputs whose type is unknown: files of subclassed Keras models do not contain it."""


@dataclass(frozen=True)
class Spec:
    """An input or output: its name, its NumPy type or `string`, and its shape, with None where any size is allowed.

    The first dimension is that of the rows.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None

    @property
    def kind(self) -> str:
        """Return the type and shape as `float32[?,28,28]`."""
        sizes = "..." if self.shape is None else ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


@dataclass(frozen=True)
class ExportedModel:
    """A model that is called with arrays by name.

    Attributes:
        format: `saved_model`, `keras`, `weights` or `tflite`.
        inputs: None if the file does not name them (a subclassed Keras model with its own `build` method).
        outputs: None if they are known only after a call.
        structure: the names of the inputs, in the structure of the inputs in training.
        call: takes arrays by input name, or the inputs as in training if `inputs` is None; returns arrays by output
            name.
    """

    format: str
    inputs: tuple[Spec, ...] | None
    outputs: tuple[Spec, ...] | None
    structure: Any
    call: Callable[[Any], dict[str, np.ndarray]]

    def __call__(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Call the model with arrays by name, cast to the types and ranks of the inputs; return arrays by name."""
        assert self.inputs is not None
        return self.call({spec.name: adapted(values[spec.name], spec) for spec in self.inputs})

    def on_structure(self, x: Any) -> dict[str, np.ndarray]:
        """Call the model on inputs as in training: an array, or a list, tuple or dict of arrays."""
        return self.call(x) if self.inputs is None else self(by_name(x, self.structure))

    def signature(self, called: Mapping[str, np.ndarray] | None = None) -> str:
        """Describe the model as `serve(image: float32[?,28,28]) -> float32[?,10]`.

        Args:
            called: outputs of a call, which are described if the outputs are unknown otherwise.
        """
        takes = "..." if self.inputs is None else ", ".join(f"{spec.name}: {spec.kind}" for spec in self.inputs)
        outputs = self.outputs or tuple(
            Spec(name, dtype_name(array), (None, *array.shape[1:])) for name, array in (called or {}).items()
        )
        alone = len(outputs) == 1 and outputs[0].name == "output_0"
        gives = outputs[0].kind if alone else ", ".join(f"{spec.name}: {spec.kind}" for spec in outputs)
        return f"{ENDPOINT}({takes}) -> {gives if alone else f'({gives})' if gives else '...'}"


def by_name(x: Any, structure: Any) -> dict[str, Any]:
    """Return the arrays of a structure by the names of the inputs.

    Raises:
        ValueError: the structures differ.
    """
    if isinstance(structure, str):
        values = leaves(x)
        if len(values) != 1:
            raise ValueError(f"{len(values)} inputs, but the model takes one: {structure}")
        return {structure: values[0]}
    names = leaves(structure)
    found = _by_place(x, structure)
    if found is None and isinstance(x, Mapping) and all(name in x for name in names):
        found = {name: x[name] for name in names}
    if found is not None:
        return found
    given = f"inputs {', '.join(map(str, x))}" if isinstance(x, Mapping) else f"{len(leaves(x))} inputs without names"
    raise ValueError(f"{given}, but the model takes {', '.join(names)}")


def _by_place(x: Any, structure: Any) -> dict[str, Any] | None:
    """Return the arrays of a structure by the names at the same places of another one; None if they differ."""
    if isinstance(structure, str):
        return None if isinstance(x, (Mapping, list, tuple)) else {structure: x}
    if isinstance(structure, Mapping):
        if not isinstance(x, Mapping):
            return None
        # an input whose name differs from its key may be given by its name
        keys = [key if key in x or not isinstance(part, str) else part for key, part in structure.items()]
        if not all(key in x for key in keys):
            return None
        parts, places = [x[key] for key in keys], list(structure.values())
    else:
        parts, places = list(x) if isinstance(x, (list, tuple)) else [x], list(structure)
    if len(parts) != len(places):
        return None
    found = [_by_place(part, place) for part, place in zip(parts, places, strict=True)]
    return None if None in found else {name: value for each in found if each for name, value in each.items()}


def adapted(value: Any, spec: Spec) -> np.ndarray:
    """Cast to the type of an input, and add or remove a last dimension of size 1 to match its rank."""
    array = np.asarray(value)
    rank = array.ndim if spec.shape is None else len(spec.shape)
    # a column of a table, [rows], for an input of [rows, 1]
    if array.ndim == 1 and rank == 2:
        array = array[:, None]
    elif array.ndim == 2 and rank == 1 and array.shape[1] == 1:
        array = array[:, 0]
    return array if spec.dtype in ("string", ANY) else array.astype(_numpy_type(spec.dtype), copy=False)


def named_outputs(outputs: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a model's outputs by the names that a SavedModel gives them.

    The name of a nested output also has the keys and indices that lead to it, joined with `/`.
    """
    if isinstance(outputs, Mapping):
        return {name: convert(leaf) for key in sorted(outputs) for name, leaf in _named(outputs[key], str(key))}
    parts = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return {name: convert(leaf) for index, part in enumerate(parts) for name, leaf in _named(part, f"output_{index}")}


def is_nested(outputs: Any) -> bool:
    """Return True if outputs contain a dict, list or tuple."""
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, (list, tuple)) else ()
    return any(isinstance(part, (Mapping, list, tuple)) for part in parts)


def _named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _named(value[key], f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _named(part, f"{name}/{index}")
    else:
        yield name, value


def map_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return {key: map_structure(function, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_structure(function, part) for part in value]
    return function(value)


def dtype_name(array: np.ndarray) -> str:
    return "string" if array.dtype.kind in "OSU" else array.dtype.name


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure, in order."""
    found: list[Any] = []
    map_structure(found.append, value)
    return found


def _numpy_type(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return ml_dtypes.bfloat16
