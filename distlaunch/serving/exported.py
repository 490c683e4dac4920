"""Opens exported models in all formats.

Imports nothing of distlaunch except the modules in this folder, since `clean_check.py` uses it in a process in which
only TensorFlow and Keras can be imported.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# a relative import, since the clean process does not know the package's full name
from .exported_model import ANY, ENDPOINT, ExportedModel, Spec, leaves, map_structure, named_outputs

_LINE = 240  # characters of an error
_FREE = "export it as saved_model, which needs no code"


class NeedsFlexError(RuntimeError):
    """A TFLite file contains operations of TensorFlow, which need a delegate that TensorFlow's package lacks."""


class NotAnExportError(ValueError):
    """The file or folder is not a model that can be called; the message says why, without the path."""


def format_of(path: Path) -> str | None:
    """Return the format of an export by its files, or None if it is not an export."""
    if (path / "saved_model.pb").is_file():
        return "saved_model"
    # compare the end of the name, since the `suffix` of these files is only `.h5`
    if path.name.endswith(".weights.h5"):
        return "weights"
    return {".keras": "keras", ".tflite": "tflite"}.get(path.suffix) if path.is_file() else None


def open_export(path: Path) -> ExportedModel:
    """Load a SavedModel folder, a .keras file or a .tflite file.

    Raises:
        NotAnExportError: it is not an export of these formats, or it is damaged.
    """
    kind = format_of(path)
    if kind == "weights":
        raise NotAnExportError("contains only weights, not a model; export it as saved_model, keras or tflite")
    if kind is None:
        raise NotAnExportError("expected a SavedModel folder, a .keras file or a .tflite file")
    opened = {"saved_model": open_saved_model, "keras": open_keras, "tflite": open_tflite}[kind]
    try:
        return opened(path)
    except NotAnExportError:
        raise
    except Exception as error:  # zip files, protocol buffers and checkpoints raise errors of many types
        raise NotAnExportError(f"cannot be loaded: {first_line(error)}") from error


def open_saved_model(path: Path) -> ExportedModel:
    """Open a SavedModel. Errors of TensorFlow are raised."""
    import tensorflow as tf

    loaded: Any = tf.saved_model.load(str(path))
    signatures = dict(loaded.signatures)
    # Keras calls it `serve`, older exports `serving_default`
    name = next((name for name in (ENDPOINT, "serving_default", *signatures) if name in signatures), None)
    if name is None:
        raise NotAnExportError("the SavedModel has no signature that could be called")
    served = signatures[name]
    specs: dict[str, Any] = served.structured_input_signature[1]
    structure = _trained_structure(getattr(loaded, name, None), specs)

    def call(values: Any) -> dict[str, np.ndarray]:
        assert loaded is not None  # keep a reference to it for later calls, since it owns the variables
        # signatures take keyword arguments of exact types
        tensors = {name: tf.constant(values[name], spec.dtype) for name, spec in specs.items()}
        return {name: value.numpy() for name, value in sorted(served(**tensors).items())}

    inputs = _ordered([_tensor_spec(name, specs[name]) for name in leaves(structure)], structure)
    outputs = tuple(_tensor_spec(name, spec) for name, spec in sorted(served.structured_outputs.items()))
    return ExportedModel("saved_model", inputs, outputs, structure, call)


def open_keras(path: Path, **options: Any) -> ExportedModel:
    """Open a .keras file. Errors of Keras are raised."""
    import keras

    try:
        model = keras.saving.load_model(path, compile=False, **options)
    except ValueError as error:
        # Keras's words: "... by passing `safe_mode=False` to the loading function"
        if "safe_mode" in str(error) and "safe_mode" not in options:
            message = f"contains Python code (a Lambda layer), which is not run from a file; {_FREE}"
            raise NotAnExportError(message) from error
        raise
    except TypeError as error:
        if name := _missing_object(error):
            raise TypeError(f"it needs your own '{name}', which is not in the file; {_FREE}") from error
        raise
    return of_keras_model(model)


def compile_note(path: Path, **options: Any) -> str | None:
    """Return a note about a .keras file that loads without its loss, metrics and optimizer only, or None."""
    import keras

    try:
        keras.saving.load_model(path, **options)
    except (TypeError, ValueError) as error:
        if name := _missing_object(error):
            need = f"needs your own '{name}' for its loss, metrics or optimizer: pass it in custom_objects"
            return f"{path.name} {need}, or load the file with compile=False"
        return (
            f"{path.name} loads only with compile=False, without its loss, metrics and optimizer: {first_line(error)}"
        )
    return None


def _missing_object(error: Exception) -> str | None:
    """Return the name of the class or function that Keras does not know, according to its error."""
    found = re.search(r"Could not locate (?:class|function) '(\w+)'", str(error))
    return found[1] if found else None


def of_keras_model(model: Any, kind: str = "keras") -> ExportedModel:
    """Wrap a model in memory."""
    import keras

    inputs, structure = _keras_inputs(model)

    def call(values: Any) -> dict[str, np.ndarray]:
        x = values if inputs is None else map_structure(lambda name: values[name], structure)
        if any(array.dtype.kind in "OSU" for array in leaves(x)):
            import tensorflow as tf

            x = map_structure(tf.constant, x)
        return named_outputs(model(x, training=False), keras.ops.convert_to_numpy)

    outputs = None
    tensors = getattr(model, "outputs", None)
    if tensors and inputs is not None:
        named = named_outputs(getattr(model, "_outputs_struct", tensors[0]), lambda tensor: tensor)
        outputs = tuple(Spec(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in sorted(named.items()))
    return ExportedModel(kind, inputs, outputs, structure, call)


def open_tflite(path: Path) -> ExportedModel:
    """Open a .tflite file. Errors of TensorFlow are raised; calls may raise NeedsFlexError."""
    import tensorflow as tf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that tf.lite moves to another package
        interpreter = tf.lite.Interpreter(model_path=str(path))
    names = list(interpreter.get_signature_list())
    if not names:
        raise NotAnExportError("the .tflite file has no signature that could be called")
    runner: Any = interpreter.get_signature_runner(ENDPOINT if ENDPOINT in names else names[0])
    inputs, outputs = (
        tuple(_lite_spec(name, detail) for name, detail in sorted(details.items()))
        for details in (runner.get_input_details(), runner.get_output_details())
    )

    def call(values: Any) -> dict[str, np.ndarray]:
        # the runner's arrays are the interpreter's memory, which the next call overwrites
        with _flex_errors_explained():
            return {name: np.array(value) for name, value in sorted(runner(**values).items())}

    structure = inputs[0].name if len(inputs) == 1 else {spec.name: spec.name for spec in inputs}
    return ExportedModel("tflite", inputs, outputs, structure, call)


def first_line(error: BaseException) -> str:
    """Return the first line of an error; for errors of Keras, also the reason below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].startswith("Exception encountered when") else lines[0]
    return text if len(text) <= _LINE else f"{text[:_LINE]} ..."


@contextlib.contextmanager
def _flex_errors_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # TFLite has no specific error type for a missing Flex delegate
        if "Flex delegate" not in str(error):
            raise
        message = "it contains operations of TensorFlow, which need an interpreter with the Flex delegate"
        raise NeedsFlexError(f"{message}; the tensorflow package has not contained it since 2.20") from error


def _trained_structure(function: Any, specs: Mapping[str, Any]) -> Any:
    """Return the names of a signature's inputs in the structure that Keras passes to the function."""
    for concrete in getattr(function, "concrete_functions", []):
        given, named = concrete.structured_input_signature
        if len(given) == 1 and not named:
            names = map_structure(lambda spec: getattr(spec, "name", None), given[0])
            if sorted(map(str, leaves(names))) == sorted(specs):
                return names
    names = sorted(specs)
    return names[0] if len(names) == 1 else {name: name for name in names}


def _keras_inputs(model: Any) -> tuple[tuple[Spec, ...] | None, Any]:
    tensors = getattr(model, "inputs", None)
    if tensors:
        names = [str(tensor.name) for tensor in tensors]
        of_tensor = {id(tensor): name for tensor, name in zip(tensors, names, strict=True)}
        nested = getattr(model, "_inputs_struct", None)
        structure = names[0] if nested is None else map_structure(lambda tensor: of_tensor[id(tensor)], nested)
        specs = [
            Spec(name, str(tensor.dtype), tuple(tensor.shape)) for tensor, name in zip(tensors, names, strict=True)
        ]
        return _ordered(specs, structure), structure
    # the shapes that a subclassed model was built with, which say nothing about types
    shapes = getattr(model, "_build_shapes_dict", None) or {}
    if len(shapes) == 1:
        ((_, shape),) = shapes.items()
        if isinstance(shape, (list, tuple)) and all(size is None or isinstance(size, int) for size in shape):
            return (Spec("inputs", ANY, (None, *shape[1:])),), "inputs"
    return None, None


def _ordered(specs: list[Spec], structure: Any) -> tuple[Spec, ...]:
    """Return the inputs. Those of a mapping are in the order of their names, since a file defines no other order."""
    return tuple(sorted(specs, key=lambda spec: spec.name) if isinstance(structure, Mapping) else specs)


def _tensor_spec(name: str, spec: Any) -> Spec:
    shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
    return Spec(name, spec.dtype.name, shape)


def _lite_spec(name: str, detail: Mapping[str, Any]) -> Spec:
    # `shape` is the shape in the last call; `shape_signature` has -1 where any size is allowed
    shape = detail.get("shape_signature", detail["shape"])
    sizes = tuple(None if size < 0 else int(size) for size in shape)
    dtype = np.dtype(detail["dtype"])
    return Spec(name, "string" if dtype.kind in "OSU" else dtype.name, sizes)
