"""Converts to TFLite and checks new exports in a clean process: `distlaunch/serving/clean_check.py`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch import serving
from distlaunch.base.errors import DistlaunchError
from distlaunch.base.helper_process import ANSWER, run_helper
from distlaunch.base.user_modules import added_folders

SCRIPT = Path(serving.__file__).with_name("clean_check.py")
_LAST_LINES = 20
_LIMIT_S = 1800.0
# TF_CONFIG would make the process a task of the cluster
_REMOVED_VARIABLES = ("TF_CONFIG", "XLA_FLAGS")


@dataclass(frozen=True)
class Finding:
    """Result of checking one format in the clean process.

    Attributes:
        signature: inputs and outputs, such as `serve(x: float32[?,28,28]) -> float32[?,10]`.
        problem: why the export cannot be used; None if it can.
        notes: facts that a user of the export should know.
    """

    signature: str
    problem: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """A few rows with the trained model's outputs for them.

    Attributes:
        rows: inputs by format, as NumPy arrays in the structure of the run's inputs; None if they are sparse or ragged.
        expected: outputs by name; None if they cannot be compared. Exports are then loaded, but not called.
        tolerance: allowed deviation, relative to the largest value of an output.
    """

    rows: Mapping[str, Any]
    expected: Mapping[str, Any] | None
    tolerance: float


@dataclass(frozen=True)
class ModelFunction:
    """The model's function with its arguments, for formats that need the user's code."""

    function: str
    args: Mapping[str, Any]


def check(files: Mapping[str, Path], to_convert: Path | None, sample: Sample, code: ModelFunction, backend: str,
          folder: Path, *, fallback: Path | None = None) -> dict[str, Finding]:  # fmt: skip
    """Check exports in a clean process, and return its findings by format.

    Args:
        files: the new exports by format; the clean process makes the file of `tflite`.
        to_convert: the SavedModel from which the TFLite file is made.
        backend: Keras backend of the run. A Keras file that does not load on this backend may load on TensorFlow.
        folder: folder for temporary files.
        fallback: the SavedModel from which the TFLite file is made if `to_convert` does not give one that works; None
            if there is none.

    Raises:
        DistlaunchError: the process died.
    """
    findings = _run(files, to_convert, sample, code, backend, folder, fallback)
    failed = {name: path for name, path in files.items() if findings[name].problem and name in ("keras", "weights")}
    if failed and backend != "tensorflow":
        for name, finding in _run(failed, None, sample, code, "tensorflow", folder).items():
            if finding.problem is None:
                note = f"{failed[name].name} works with Keras on TensorFlow, but not on {backend}: "
                notes = (*finding.notes, note + str(findings[name].problem))
                findings[name] = Finding(finding.signature, None, notes)
    return findings


def _run(files: Mapping[str, Path], to_convert: Path | None, sample: Sample, code: ModelFunction, backend: str,
         folder: Path, fallback: Path | None = None) -> dict[str, Finding]:  # fmt: skip
    request = folder / "parcel.pickle"
    content = {
        "files": {name: str(path) for name, path in files.items()},
        "to_convert": str(to_convert),
        "fallback": None if fallback is None else str(fallback),
        "rows": dict(sample.rows),
        "expected": sample.expected,
        "tolerance": sample.tolerance,
        "function": code.function,
        "args": dict(code.args),
        # for finding the user's module as in this process; an empty entry means the working directory
        "sys_path": [entry or os.getcwd() for entry in sys.path],
        "folders": added_folders(),
    }
    # pickled, because rows may be arrays of text, which contain Python objects
    request.write_bytes(pickle.dumps(content))
    # -P keeps the working directory and the script's folder off the module path
    command = [sys.executable, "-P", str(SCRIPT), str(request), ANSWER]
    kept = {name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES}
    # on the CPU, because this process occupies the GPUs
    environment = {**kept, "KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    try:
        # in the same working directory: the model's function may open files by relative paths
        answer = run_helper(command, environment, timeout_s=_LIMIT_S)
    except TimeoutError:
        raise DistlaunchError(f"the exports could not be checked within {_LIMIT_S:g} s; nothing was replaced") from None
    if answer.code != 0 or answer.value is None:
        why = " (perhaps because memory ran out)" if answer.code == -signal.SIGKILL else ""
        how, output = f"{answer.how_it_ended}{why}", answer.last_lines(_LAST_LINES)
        raise DistlaunchError(
            f"the process that checks the exports {how}; nothing was replaced" + (f":{output}" if output else "")
        )
    found = answer.value
    return {name: Finding(entry["signature"], entry["problem"], tuple(entry["notes"])) for name, entry in found.items()}
