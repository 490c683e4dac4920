"""Loads and calls new exports, and makes those for TFLite, in a process without distlaunch and without a strategy.

Run as a file, not as a module: `python -P clean_check.py PARCEL FINDINGS`. The file PARCEL contains the request, a
pickled dict (see `distlaunch.training.export.check`). The findings are JSON: `{format: {signature, problem, notes}}`.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import importlib.util
import json
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ORDER = ("tflite", "saved_model", "keras", "weights")
"""Order of the checks: those that may import the user's code come last."""

FIXED_NOTE = (
    "takes only inputs of the sizes in its signature, those of the run's first examples, although other batches have "
    "other sizes: the model cannot be exported for any size"
)
"""Words of a note that follow the name of the file."""
_HOOKS_S = 3.0  # for all exit hooks together


def main() -> None:
    parcel_path, findings_path = map(Path, sys.argv[1:])
    parcel = pickle.loads(parcel_path.read_bytes())  # safe: the process that waits for this one has written it
    exported = _sibling("exported")
    findings = {name: _check(name, parcel, exported) for name in ORDER if name in parcel["files"]}
    findings_path.write_text(json.dumps(findings), encoding="utf-8")
    # `os._exit` flushes nothing
    sys.stdout.flush()
    sys.stderr.flush()
    # destroying TFLite interpreters and compiled functions takes long, so this process exits without it; exit hooks
    # have limited time
    watchdog = threading.Timer(_HOOKS_S, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()
    atexit._run_exitfuncs()
    os._exit(0)


def _check(name: str, parcel: Mapping[str, Any], exported: Any) -> dict[str, Any]:
    found = _check_once(name, parcel, exported)
    # the notes about a TFLite file say that it needs operations of TensorFlow
    if name != "tflite" or parcel["fallback"] is None or (found["problem"] is None and not found["notes"]):
        return found
    path = Path(parcel["files"][name])
    first = path.read_bytes() if path.exists() else None
    again = _check_once(name, {**parcel, "to_convert": parcel["fallback"]}, exported)
    if again["problem"] is None and (found["problem"] is not None or not again["notes"]):
        return {**again, "notes": [*again["notes"], f"{path.name} {FIXED_NOTE}"]}
    if first is not None:
        path.write_bytes(first)
    return found


def _check_once(name: str, parcel: Mapping[str, Any], exported: Any) -> dict[str, Any]:
    notes: list[str] = []
    try:
        path = Path(parcel["files"][name])
        if name == "tflite":
            to_tflite(Path(parcel["to_convert"]), path, notes)
        model = _open(name, path, parcel, notes, exported)
        rows = parcel["rows"][name]
        if parcel["expected"] is None or rows is None:
            return {"signature": model.signature(), "problem": None, "notes": notes}
        try:
            outputs = model.on_structure(rows)
        except exported.NeedsFlexError:
            notes[-1] += ", which the tensorflow package has not contained since 2.20, so this file was not called"
            return {"signature": model.signature(), "problem": None, "notes": notes}
        problem = difference(parcel["expected"], outputs, parcel["tolerance"])
        return {"signature": model.signature(outputs), "problem": problem, "notes": notes}
    except Unusable as error:
        return {"signature": "", "problem": str(error), "notes": notes}
    except Exception as error:  # any error means that the export cannot be used
        problem = f"it cannot be loaded and called: {type(error).__name__}: {exported.first_line(error)}"
        return {"signature": "", "problem": problem, "notes": notes}


class Unusable(Exception):  # noqa: N818 (users see its message, not its name)
    """The export cannot be made, or cannot be used; the message says why."""


def _open(name: str, path: Path, parcel: Mapping[str, Any], notes: list[str], exported: Any) -> Any:
    if name == "saved_model":
        return exported.open_saved_model(path)
    if name == "tflite":
        # the file only names its inputs; the SavedModel shows whether the model takes a list or another structure
        structure = exported.open_saved_model(Path(parcel["to_convert"])).structure
        return dataclasses.replace(exported.open_tflite(path), structure=structure)
    if name == "weights":
        return _with_weights(path, parcel, exported)
    return _open_keras(path, parcel, notes, exported)


def _open_keras(path: Path, parcel: Mapping[str, Any], notes: list[str], exported: Any) -> Any:
    """Open a file as its users can, and add notes about the code and the options that they need."""
    model, options = _open_with_options(path, parcel, notes, exported)
    if note := exported.compile_note(path, **options):
        notes.append(note)
    return model


def _open_with_options(
    path: Path, parcel: Mapping[str, Any], notes: list[str], exported: Any
) -> tuple[Any, dict[str, Any]]:
    """Open a file without the user's code if possible, otherwise with it; return the model and Keras's options."""
    options: dict[str, Any] = {}
    try:
        return exported.open_keras(path), options
    except exported.NotAnExportError:
        notes.append(f"{path.name} contains Python code (a Lambda layer): load it with safe_mode=False")
        options = {"safe_mode": False}
    except (TypeError, ValueError):
        pass
    try:
        if options:
            return exported.open_keras(path, **options), options
    except (TypeError, ValueError):
        pass
    module = _user_module(parcel)
    source = parcel["function"].rpartition(":")[0]
    source = Path(source).name if source.endswith(".py") else source
    need = f"{path.name} contains your own classes or functions: import {source} before you load it"
    try:
        model = exported.open_keras(path, **options)
        notes.append(need)
    except (TypeError, ValueError):
        objects = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
        options = {**options, "custom_objects": objects}
        model = exported.open_keras(path, **options)
        hint = "and pass them as custom_objects, or register them with @keras.saving.register_keras_serializable()"
        notes.append(f"{need}, {hint}")
    return model, options


def _with_weights(path: Path, parcel: Mapping[str, Any], exported: Any) -> Any:
    module = _user_module(parcel)
    model = getattr(module, parcel["function"].rpartition(":")[2])(**parcel["args"])
    rows = parcel["rows"]["weights"]
    if not model.built:
        model(_sibling("exported_model").map_structure(np.asarray, rows), training=False)
    model.load_weights(path)
    return exported.of_keras_model(model, "weights")


def _user_module(parcel: Mapping[str, Any]) -> Any:
    """Import the module of the model's function, with the user's paths."""
    # extend the path only now: the user's modules cannot hide libraries that are already imported
    sys.path[:] = [*parcel["sys_path"], *(entry for entry in sys.path if entry not in parcel["sys_path"])]
    user_modules = _load("_user_modules", Path(__file__).parents[1] / "base" / "user_modules.py")
    for folder in parcel["folders"]:
        user_modules.add_folder(folder)
    source = parcel["function"].rpartition(":")[0]
    sys.argv = [source]
    if not source.endswith(".py"):
        return user_modules.import_users(source)
    path = Path(source)
    user_modules.add_package_of(path)
    return _load(path.stem, path)


def to_tflite(saved_model: Path, target: Path, notes: list[str]) -> None:
    """Convert the signature `serve`; use operations of TensorFlow only where TFLite has none.

    Raises:
        Unusable: it cannot be converted; the message names the operations.
    """
    import tensorflow as tf

    def convert(*, select: bool) -> bytes:
        converter = tf.lite.TFLiteConverter.from_saved_model(str(saved_model), signature_keys=["serve"])
        if select:
            lite: Any = tf.lite.OpsSet
            converter.target_spec.supported_ops = [lite.TFLITE_BUILTINS, lite.SELECT_TF_OPS]
            # recurrent layers of any batch size need tensor lists
            converter._experimental_lower_tensor_list_ops = False
        return converter.convert()

    try:
        content = convert(select=False)
    except Exception:  # ConverterError is not public
        try:
            content = convert(select=True)
        except Exception as error:
            raise Unusable(inconvertible(str(error))) from error
        # the file names them like `FlexErf`; `FlexDelegate` is not an operation
        operations = sorted({name.decode() for name in re.findall(rb"Flex(\w+)", content)} - {"Delegate"})
        listed = ", ".join(operations) or "some"
        notes.append(
            f"{target.name} contains operations that TFLite does not have ({listed}): "
            "it needs an interpreter with the Flex delegate"
        )
    target.write_bytes(content)


def inconvertible(message: str) -> str:
    named = re.findall(r"(?:TF Select|Custom|Flex) ops: (.*)", message)
    operations = sorted({name.strip() for names in named for name in names.split(",") if name.strip()})
    if not operations:
        found = {*re.findall(r"'(?:tf|tfl)\.(\w+)' op", message), *re.findall(r'\["(\w+):', message)}
        operations = [name for name in sorted(found) if not name.endswith("PartitionedCall")]
    what = f"the operations {', '.join(operations)}" if operations else "this model"
    reason = "" if operations else f" ({message.strip().splitlines()[0]})"
    return f"TFLite cannot express {what}, not even with TensorFlow Select{reason}; saved_model can"


def difference(expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], tolerance: float) -> str | None:
    """Return where outputs differ from those of the trained model, or None.

    Args:
        tolerance: relative to the largest value of an output.
    """
    if sorted(expected) != sorted(got):
        return f"its outputs are {', '.join(sorted(got))}; the model's are {', '.join(sorted(expected))}"
    for name, wanted in expected.items():
        value = np.asarray(got[name])
        if value.shape != wanted.shape:
            return f"{name} has the shape {list(value.shape)}; the model's has {list(wanted.shape)}"
        # V: types that NumPy does not know, such as bfloat16
        if wanted.dtype.kind not in "fcV":
            if not np.array_equal(wanted, value):
                return f"{name} differs from the model's: {_sample(wanted != value, value, wanted)}"
            continue
        ours, theirs = wanted.astype(np.float64), value.astype(np.float64)
        scale = np.abs(ours[np.isfinite(ours)]).max(initial=0.0)
        # relative to the largest value, whose rounding errors also affect small values
        close = np.isclose(theirs, ours, rtol=0.0, atol=tolerance * scale + 1e-6, equal_nan=True)
        if not close.all():
            return f"{name} differs from the model's: {_sample(~close, theirs, ours)}; allowed: {tolerance:g} of the " \
                   "largest value"  # fmt: skip
    return None


def _sample(different: np.ndarray, got: np.ndarray, wanted: np.ndarray) -> str:
    first = tuple(int(index) for index in np.argwhere(different)[0])
    return f"{got[first]} instead of {wanted[first]} at {list(first)}"


def _sibling(name: str) -> Any:
    """Import a module beside this file under another package name: distlaunch may not be importable here."""
    package = types.ModuleType("_exports")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{name}")


def _load(name: str, path: Path) -> Any:
    """Load a module from its file, without adding its folder to the path, where it could hide libraries."""
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # before it runs, since dataclasses look up their module there
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
