"""Advice after a failure: what to do first, and whether resuming the run then helps."""

from __future__ import annotations

import contextlib
import difflib
import re
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from distlaunch.supervise.diagnose.exit_reason import TaskError
from distlaunch.supervise.diagnose.user_frames import short_user_frame, user_folders
from distlaunch.supervise.state import Cause

_LEGACY = "install tf_keras and set TF_USE_LEGACY_KERAS=1"
_FIT = f"Keras 3's `fit` cannot do this; write a training loop, use `distlaunch train`, or {_LEGACY}"

_HINTS = [
    (r"Attempt to convert a value \(PerReplica", _FIT),
    (r"pass this dataset to `?(ClusterCoordinator\.)?create_per_worker_dataset", _FIT),
    (r"'ShardedVariable' object has no attribute", "Keras 3 cannot train split variables: leave `variable_partitioner` "
     f"out, use `partitioner` of `distlaunch train`, or {_LEGACY}"),
    (r"has no attribute 'reset_states'", f"write `reset_state()`, its name in Keras 3, or {_LEGACY}"),
    (r"A KerasTensor (cannot be used as input to a TensorFlow function|is symbolic)",
     f"between layers, use keras.ops with Keras 3 (keras.ops.mean for tf.reduce_mean); or {_LEGACY}"),
    (r"module '[\w.]*keras[\w.]*' has no attribute '(experimental|legacy|dtensor)'",
     f"Keras 3 no longer has it; {_LEGACY}"),
    (r"Received a label value of \S+ which is outside the valid range", "labels must be smaller than the number of the "
     "model's outputs: correct the labels, or give the last layer more units"),
    (r"[Uu]nable to (synchronously )?(lock|open|create) file", "each task must write to a different path: use "
     "os.environ['DISTLAUNCH_TASK'] in the path"),
    (r"module 'tensorflow[\w.]*' has no attribute 'estimator'",
     "TensorFlow no longer has estimators; docs/parameter_servers.md lists replacements"),
]  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """Advice to the user.

    Attributes:
        first: what to do first, in the imperative; empty if nothing.
        resume: whether the run can be resumed after that.
    """

    first: str = ""
    resume: bool = True


_LESS_MEMORY = Advice("use less memory (a smaller data.global_batch, more workers)")
_ADVICE_BY_EXCEPTION = {
    "NonFiniteError": Advice("choose other values (add `--set compile.optimizer.args.learning_rate=...`, for example)"),
    "DataError": Advice("correct the data"),
    "CheckpointError": Advice(resume=False),  # its message says what to do
    "CheckpointWriteError": Advice("make room"),
    "ExportError": Advice("fix what keeps the model from being exported"),
    "MemoryError": _LESS_MEMORY,
    "ResourceExhaustedError": _LESS_MEMORY,
}
_JAX_HAS_NO_MEMORY = re.compile(r"JaxRuntimeError: RESOURCE_EXHAUSTED: ")
"""Beginning of JAX's error if a device has too little memory; all errors of its runtime have the same type."""


_PACKAGES = {
    "PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "skimage": "scikit-image", "yaml": "pyyaml",
    "bs4": "beautifulsoup4", "dateutil": "python-dateutil",
}  # fmt: skip
"""Names of packages that differ from the names of their modules."""
_INSTALLED = ("tensorflow", "keras", "numpy", "jax", "distlaunch")
"""Names of installed modules. A missing module with a similar name is probably misspelled."""


def advise(
    why: Cause,
    error: TaskError | None,
    code: int | None,
    *,
    start_timeout_s: float,
    stall_timeout_s: float | None,
    stop_timeout_s: float,
    oom: bool | None = None,
    late: bool = False,
    unstartable: bool = False,
    hosts: bool = False,
) -> Advice:
    """Return the advice for the cause of a failure.

    Args:
        error: the error that the failed task reported, if any.
        code: the exit code of the failed task, if it has ended.
        oom: whether the kernel's OOM killer ended the task.
        late: whether the task did not stop in time.
        unstartable: whether its process could not be started.
        hosts: whether the job has tasks on several hosts.
    """
    if why is Cause.OVERDUE:
        return Advice(f"if the tasks were only slow, raise cluster.start_timeout_s (now {start_timeout_s:g})")
    if why is Cause.STALLED:
        return Advice(f"if the step was only slow, raise cluster.stall_timeout_s (now {stall_timeout_s:g})")
    if late:
        return Advice(f"if it was only slow to save, raise cluster.stop_timeout_s (now {stop_timeout_s:g})")
    if unstartable:
        return Advice("fix what keeps the process from starting")
    if error is not None and not error.consequence:
        return _after_error(error, hosts=hosts)
    if code == -signal.SIGKILL and oom:
        return _LESS_MEMORY
    return Advice()


def _after_error(error: TaskError, *, hosts: bool) -> Advice:
    if error.lost:
        return Advice()
    if error.kind in _ADVICE_BY_EXCEPTION:
        return _ADVICE_BY_EXCEPTION[error.kind]
    if _JAX_HAS_NO_MEMORY.match(error.summary):
        return _LESS_MEMORY
    if error.user_error:
        # such as `/home/u/st.py:49: breakpoint(): a task has no terminal`
        named = re.match(r"(\S[^:]*\.py):(\d+): ", error.summary)
        return Advice(f"fix {Path(named[1]).name}:{named[2]}" if named else "fix that")
    lines = error.traceback.splitlines()
    if variable := _OF_ENVIRONMENT.match(error.summary.strip()):
        return Advice(f"correct {variable[1]} in the environment, or unset it")
    if shadowed := _shadowed_file(error, user_folders(lines)):
        return Advice(f"rename {shadowed}: another module with this name is already loaded")
    if package := _missing_package(error, user_folders(lines)):
        return Advice(f"install it (`pip install {package}`, for the Python that runs distlaunch on that host)")
    place = short_user_frame(lines)
    fix = f"fix {place}" if place else "fix the error above"
    # a file may be missing only because it was not copied to one of several hosts
    file = re.fullmatch(r"FileNotFoundError: \[Errno 2\] No such file or directory: '(.*/.+)'", error.summary.strip())
    return Advice(
        f"copy {file[1]} to that host if it is missing only there, otherwise {fix}" if file and hosts else fix
    )


_OF_ENVIRONMENT = re.compile(r"ValueError: invalid truth value .* for environment '(\w+)'")
"""An error that JAX raises when it is imported."""
_OF_MODULE = re.compile(
    r"ImportError: cannot import name '\w+' from '(?P<partly>\w+)'(?: \((?P<file>.*)\))?"
    r"|ModuleNotFoundError: No module named '(?P<parent>\w+)\.[\w.]+'; '\w+' is not a package"
    r"|AttributeError: module '(?P<module>\w+)' has no attribute '\w+'"
)


def _shadowed_file(error: TaskError, folders: Collection[Path]) -> str:
    """Return the user's file that cannot be imported because a library's module has its name, or an empty string."""
    if (match := _OF_MODULE.match(error.summary.strip())) is None:
        return ""
    name = match["partly"] or match["parent"] or match["module"]
    if match["file"] is None and name not in {*sys.stdlib_module_names, *_INSTALLED}:
        return ""  # the imported module may be the user's file
    files = [file for folder in folders for file in (folder / f"{name}.py", folder / name / "__init__.py")]
    return next((str(file) for file in files if str(file) != match["file"] and file.is_file()), "")


def _missing_package(error: TaskError, folders: Collection[Path]) -> str:
    """Return the package to install for a missing module, or an empty string.

    It is empty if the name may be misspelled or may be that of a file of the user.

    Args:
        folders: the folders of the user's files.
    """
    missing = re.fullmatch(r"ModuleNotFoundError: No module named '(\w+)'", error.summary.strip())
    if missing is None:  # with a dotted name (`keras.no`), the package is installed
        return ""
    name = missing[1]
    known = {*sys.stdlib_module_names, *_PACKAGES, *_INSTALLED}
    for folder in folders:
        with contextlib.suppress(OSError):
            known |= {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    is_of_user = name.startswith("_") or (
        name not in _PACKAGES and difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    )
    return "" if is_of_user else _PACKAGES.get(name, name)


def hint_for(error: TaskError | None) -> str:
    """Return a hint about how to fix an exception, or an empty string."""
    if error is None:
        return ""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, error.summary)), "")
