"""What every task imports: for a process that tasks are forked from. Creates nothing, and starts no thread.

After that no tensor, no variable and no device may have been asked for: neither framework survives a fork then.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Sequence

from distlaunch.base.compat import frameworks
from distlaunch.base.errors import ConfigError
from distlaunch.base.plural import count
from distlaunch.config.backend import choose_backend
from distlaunch.patches.tensorflow_lite import without_jax
from distlaunch.tasks.threads import num_threads

_POOLS_OF_THEIR_OWN = ("numpy", "scipy.linalg")
"""Each brings an OpenBLAS, which starts a thread for each core when it is loaded, and survives forks."""
_TASKS = (
    "config.read.load",
    "tasks.process_end",
    "tasks.no_terminal",
    "training.session",
    "training.server",
    "training.evaluator",
    "training.trials.recorder",
)
_STEPS = ("strategies.replica.program:ReplicaProgram._make_call.<locals>.call",
          "strategies.parameter_server.program:CoordinatorProgram._make_call.<locals>.call")  # fmt: skip
"""Given to TensorFlow themselves; the others are called by what it converts."""
_ORDERS = ("data.split:Split.training_source.<locals>.one_pass",)
_READS = ("data.sources.indexed:Indexed.read", "data.split:Split.load", "data.rows:_loaded.<locals>.load")
_TRACED = {"evaluate": (_READS, _STEPS), "predict": (_READS,), "export": ()}
_TRACED_IN_TRAINING = (_ORDERS, _READS, _STEPS)
"""Functions that TensorFlow traces in most tasks, by what the task does, and that AutoGraph has to convert for that."""


def main(arguments: Sequence[str]) -> str:
    """Imports for tasks of a backend.

    Args:
        arguments: the backend; what the tasks do, if they do not train.

    Returns:
        Why this process must not be forked; empty if it may.
    """
    backend, *words = arguments
    # first, and not counted: their threads are there already when `num_threads` counts
    for name in _POOLS_OF_THEIR_OWN:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    threads = num_threads()
    try:
        choose_backend(backend)  # pyright: ignore[reportArgumentType]
    except ConfigError as error:
        return str(error)
    with contextlib.nullcontext() if backend == "jax" else without_jax():
        for name in frameworks(backend):
            importlib.import_module(name)
    for name in _TASKS:
        importlib.import_module(f"distlaunch.{name}")
    from distlaunch.config.strategies import MODELS
    from distlaunch.config.strategies.base import FUNCTIONAL_STEP
    from distlaunch.strategies.factory import implementation

    strategies = [kind for kind, model in MODELS.items() if model.backend == backend]
    for kind in strategies:
        implementation(MODELS[kind])
    used = next((_TRACED[word] for word in words if word in _TRACED), _TRACED_IN_TRAINING)
    if all(FUNCTIONAL_STEP in MODELS[kind].step_forms for kind in strategies):
        # TensorFlow reads the data, and runs nothing else
        used = tuple(group for group in used if group in (_ORDERS, _READS))
    _convert_ahead(used)
    os.register_at_fork(after_in_child=_new_random_numbers)
    # only the forking thread lives on in a child: a lock that another holds would stay locked
    more = num_threads() - threads
    return f"importing has started {count(more, 'thread')}" if more > 0 else ""


def _convert_ahead(groups: Sequence[Sequence[str]]) -> None:
    from distlaunch.patches.tensorflow_autograph import convert_ahead

    for place in itertools.chain.from_iterable(groups):
        convert_ahead(f"distlaunch.{place}", entry=place in _STEPS)


def _new_random_numbers() -> None:
    """As in a fresh process: Python seeds its own anew after a fork, NumPy does not."""
    sys.modules["numpy"].random.seed()
