"""Runs an exported model in a helper process with TensorFlow, which the launcher never imports."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distlaunch.agent.log_noise import is_noise
from distlaunch.base.errors import ConfigError, DistlaunchError, UsageError
from distlaunch.base.events import Predicted
from distlaunch.base.helper_process import ANSWER, Answer, run_helper
from distlaunch.base.protocol import MODULES_FOLDER, SAFE_MODULE
from distlaunch.base.run_dir import RunDir, checkpoint_name
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import kept_variables
from distlaunch.config.read.load import load_resolved
from distlaunch.config.references.moved import find_moved
from distlaunch.plan.train import REMOVED_ENV

SUFFIXES = (".npy", ".npz", ".csv", ".tsv", ".txt", ".jsonl")
"""Suffixes of the files whose examples can be predicted."""
_USABLE = ("saved_model", "keras", "tflite")
"""Export formats that hold a model, in order of preference."""
_LAST_LINES = 20


@dataclass(frozen=True)
class PredictRequest:
    """A request for predictions of an export.

    Attributes:
        target: an export, or a run directory that has one.
        input: a file with examples; None to use `data`.
        data: a data function, or `tfds:NAME`.
        output: a file, or `-` for JSON lines on standard output. None: a file in the current directory, named after the
            input.
    """

    target: str
    input: str | None
    data: str | None
    split: str | None
    output: str | None
    batch_size: int


def is_export(target: str) -> bool:
    """Return True if a path looks like an exported model."""
    path = Path(target)
    return (path / "saved_model.pb").is_file() or (path.is_file() and path.suffix in (".keras", ".tflite", ".h5"))


def predict_export(
    request: PredictRequest, machine: Machine, note: Callable[[str], None] = lambda text: None
) -> Predicted:
    """Write the predictions, and return the event that describes them.

    Args:
        note: called with a line if the export is older than its run, or if the run's `data.map` is applied.

    Raises:
        UsageError: the export, the file or the dataset cannot be used.
        ConfigError: the run's config cannot be read, or its `data.map` is not found.
        DistlaunchError: the helper process died.
    """
    export = find_export(request.target)
    if _is_older_than_run(RunDir(request.target), export):
        note(f"warning: {request.target} was trained further after its export was written; predicting with the export "
             f"({export}). `distlaunch export {request.target}` writes a new one")  # fmt: skip
    if request.input is not None:
        _check_input(Path(request.input))
    name = Path(request.input).name if request.input is not None else str(request.data)
    stem = Path(request.input).stem if request.input is not None else request.split or "data"
    output = request.output or str(Path(f"{stem}.predictions.npz").absolute())
    given = ["--input", request.input] if request.input is not None else ["--data", str(request.data)]
    split = ["--split", request.split] if request.split is not None else []
    where = ["--output", output, "--batch-size", str(request.batch_size)]
    # round as in training, if the export is in the directory of its run
    settings = kept_variables(machine.hardware, RunDir(export.absolute().parents[1]).recorded_settings())
    mapping, modules = ([], {}) if request.data is None else _map_of(request.target, note)
    arguments = ["--export", str(export), *given, *mapping, *split, *where]
    shapes = _run(arguments, export, {**machine.environ, **settings, **modules})
    return Predicted(time=time.time(), step=None, split=name, path=output, shapes=shapes)


def _map_of(target: str, note: Callable[[str], None]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the variables with which the helper process finds the `data.map` of a run.

    Both are empty if the target is not a run, or if its config has no `data.map`.

    Raises:
        ConfigError: the function is not found.
    """
    run = RunDir(target)
    if is_export(target) or not run.has_config():
        return [], {}
    # without the values of secrets, which a run keeps only until it is done, and which `data.map` cannot have
    config = load_resolved(run.config)
    if config.data.map is None:
        return [], {}
    moved = find_moved(config, run)
    if problems := [problem for problem in moved.problems if problem.key == ("data", "map")]:
        raise ConfigError(problems)
    config = moved.applied_to(config)
    note(f"data.map of {target} is applied to each example of --data: {config.data.map}")
    return ["--map", str(config.data.map)], {} if moved.modules is None else {MODULES_FOLDER: str(moved.modules)}


def _is_older_than_run(run: RunDir, export: Path) -> bool:
    """Return True if the run has a newer checkpoint than the export."""
    steps = run.checkpoint_steps()
    file = export / "saved_model.pb" if export.is_dir() else export
    try:
        return bool(steps) and file.stat().st_mtime < (run.checkpoints / checkpoint_name(steps[-1])).stat().st_mtime
    except OSError:  # another process may be replacing one of the files
        return False


def find_export(target: str) -> Path:
    """Return the export that a target names, or the best one of a run directory.

    Raises:
        UsageError: there is none, or it does not take the rows of files.
    """
    path, run = Path(target), RunDir(target)
    if is_export(target):
        return path
    if run.has_config():
        found = next((run.exported(kind) for kind in _USABLE if run.exported(kind).exists()), None)
        if found is not None and found == run.exported("keras") and _has_preprocessing(run):
            raise UsageError(
                f"{target}: its export {found.name} takes the output of data.preprocessing, and not the rows of files; "
                f"write one that includes the layer: distlaunch export {target} --format saved_model"
            )
        if found is None:
            raise UsageError(f"{target}: the run has no export yet; write one: distlaunch export {target} "
                             "--format saved_model")  # fmt: skip
        return Path(os.path.relpath(found)) if not path.is_absolute() else found
    if not path.exists():
        raise UsageError(f"{target}: there is no such file or folder")
    expected = "expected a run directory, a SavedModel folder (with saved_model.pb), or a .keras or .tflite file"
    raise UsageError(f"{target} is not an export; {expected}")


def _has_preprocessing(run: RunDir) -> bool:
    import yaml  # imported here, since it takes 30 ms

    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    return bool(config["data"].get("preprocessing"))


def _check_input(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--input {path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UsageError(f"--input {path}: {'it is a folder' if path.is_dir() else 'there is no such file'}")


def _run(arguments: list[str], export: Path, environ: Mapping[str, str]) -> dict[str, list[int]]:
    kept = {name: value for name, value in environ.items() if name not in REMOVED_ENV}
    argv = [sys.executable, *SAFE_MODULE, "distlaunch.tasks.predict_export", *arguments, "--answer", ANSWER]
    # show the output, since predictions may be written to standard output
    answer = run_helper(argv, kept, shows_output=True)
    if answer.value is None:
        raise DistlaunchError(_describe_crash(export, answer))
    if "message" in answer.value:
        kind = UsageError if answer.code == UsageError.exit_code else DistlaunchError
        raise kind(answer.value["message"])
    return answer.value.get("shapes", {})


def _describe_crash(export: Path, answer: Answer) -> str:
    # native code crashes on damaged files
    damaged = " (is the export damaged?)" if answer.code < 0 else ""
    shown = replace(answer, output=tuple(line for line in answer.output if not is_noise(line)))
    last = shown.last_lines(_LAST_LINES, indent="  ")
    return f"{export}: the prediction process {answer.how_it_ended}{damaged}" + (f":{last}" if last else "")
