"""Makes a graph that one process has traced call a Python function of the process that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol

_FUNCTIONS = Symbol("tensorflow.python.ops.script_ops._py_funcs._funcs")

PATCH = Patch(
    symbols=(
        _FUNCTIONS,
        Symbol("tensorflow.python.ops.script_ops.FuncRegistry.__call__", "(self, token, device, args)"),
    ),
    why="Graphs find Python functions by a token that is unique in the process that traced them. The workers of a "
    "parameter-server job run graphs that the coordinator has traced, and read their data in Python.",
    until="tf.py_function can name a function that every process registers.",
)


def answer(token: str, function: Callable[..., Any]) -> None:
    """Register the function that graphs in this process find by this token."""
    PATCH.check()
    # a WeakValueDictionary: the caller must keep the function alive
    _FUNCTIONS.get()[token] = function
