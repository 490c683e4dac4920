"""Lets a loop or a branch of a graph look things up in a table that each worker has a copy of."""

from __future__ import annotations

import functools
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal

_GRAPHS = "tensorflow.python.ops.control_flow_v2_func_graphs"
_CLASSES = tuple(f"{_GRAPHS}.{name}" for name in ("WhileBodyFuncGraph", "WhileCondFuncGraph", "CondBranchFuncGraph"))
_CAPTURE = "tensorflow.python.framework.func_graph.FuncGraph.capture_call_time_value"

PATCH = Patch(
    symbols=(
        Symbol(_CAPTURE, "(self, closure, spec, key=None, default_value=None, placeholder=None)"),
        *(Symbol(path) for path in _CLASSES),
    ),
    why="A table of a lookup layer is found when a function is called, by the worker that it is called on. TensorFlow "
    "hands that on from nested functions to the outer one, but not from loops and branches, where the table stays a "
    "placeholder that nobody feeds. Workers train many steps in one loop.",
    until="Loops and branches of a graph hand on what is captured at the time of a call.",
)


@functools.cache
def install() -> None:
    """Let loops and branches take from the graph around them what is captured at the time of a call."""
    PATCH.check()

    def capture(self: Any, closure: Any, spec: Any, key: Any = None, default_value: Any = None) -> Any:
        return self.capture(self.outer_graph.capture_call_time_value(closure, spec, key, default_value))

    for path in _CLASSES:
        internal(path).capture_call_time_value = capture
