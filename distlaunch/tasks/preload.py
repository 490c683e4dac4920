"""Imports what every task needs, in a process that tasks are forked from. Creates nothing, and starts no thread.

The imports must not create any tensor, variable or device: after that, neither framework survives a fork.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence

from distlaunch.base.compat import frameworks
from distlaunch.base.errors import ConfigError
from distlaunch.base.plural import count
from distlaunch.base.protocol import WITH_TENSORFLOW
from distlaunch.config.backend import choose_backend
from distlaunch.patches.tensorflow_late import is_imported
from distlaunch.tasks.framework_imports import import_frameworks
from distlaunch.tasks.threads import num_openblas_threads, num_threads

_TASKS = (
    "config.read.load",
    "tasks.process_end",
    "tasks.no_terminal",
    "training.session",
    "training.trials.recorder",
)
_TASKS_ON_TENSORFLOW = ("training.server", "training.evaluator")
_STEPS = ("strategies.replica.program:ReplicaProgram._make_call.<locals>.call",)
"""Functions passed to TensorFlow directly. Those below are called by functions that AutoGraph has converted."""
_ORDERS = ("data.split:Split.training_source.<locals>.one_pass",)
_READS = ("data.sources.indexed:Indexed.read", "data.split:Split.load", "data.rows:_load_batches.<locals>.load")
_TRACED = {"evaluate": (_READS, _STEPS), "predict": (_READS,), "export": ()}
_TRACED_IN_TRAINING = (_ORDERS, _READS, _STEPS)
"""Functions that TensorFlow traces in most tasks that train, so that AutoGraph has to convert them."""


def main(arguments: Sequence[str]) -> str:
    """Import the modules for tasks of a backend.

    Args:
        arguments: the backend; then the tasks' mode, if they do not train; then `WITH_TENSORFLOW`, if tasks on another
            backend need it.

    Returns:
        Why this process must not be forked; empty if it may.
    """
    backend, *words = arguments
    threads = _num_unfit_threads()
    try:
        choose_backend(backend)  # pyright: ignore[reportArgumentType]
    except ConfigError as error:
        return str(error)
    # tasks on JAX may never need TensorFlow
    import_frameworks(backend, frameworks(backend) if WITH_TENSORFLOW in words else (backend, "keras"))
    for name in (*_TASKS, *_TASKS_ON_TENSORFLOW) if is_imported() else _TASKS:
        importlib.import_module(f"distlaunch.{name}")
    from distlaunch.config.strategies import MODELS
    from distlaunch.config.strategies.base import FUNCTIONAL_STEP
    from distlaunch.strategies.factory import implementation

    strategies = [kind for kind, model in MODELS.items() if model.backend == backend]
    for kind in strategies:
        implementation(MODELS[kind])
    used = next((_TRACED[word] for word in words if word in _TRACED), _TRACED_IN_TRAINING)
    if all(FUNCTIONAL_STEP in MODELS[kind].step_forms for kind in strategies):
        # TensorFlow only reads the data
        used = tuple(group for group in used if group in (_ORDERS, _READS))
    if is_imported():
        _convert_ahead(used)
    os.register_at_fork(after_in_child=_new_random_numbers)
    # only the forking thread exists in a child: a lock held by another thread would stay locked
    more = _num_unfit_threads() - threads
    return f"importing has started {count(more, 'thread')}" if more > 0 else ""


def _num_unfit_threads() -> int:
    """Return the number of threads that a forked process would lack; OpenBLAS starts its own again."""
    return num_threads() - num_openblas_threads()


def _convert_ahead(groups: Sequence[Sequence[str]]) -> None:
    from distlaunch.patches.tensorflow_autograph import convert_ahead

    for place in itertools.chain.from_iterable(groups):
        convert_ahead(f"distlaunch.{place}", entry=place in _STEPS)


def _new_random_numbers() -> None:
    """Reseed NumPy as in a fresh process; Python reseeds its own generator after a fork."""
    sys.modules["numpy"].random.seed()
