"""Makes lookups in per-worker tables work in loops and branches of a graph."""

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
    why="A table of a lookup layer is found when a function is called, on the worker that runs it. TensorFlow passes "
    "such captures from nested functions to the outer one, but not from loops and branches, in which the table "
    "remains a placeholder without a value. Workers train many steps in one loop.",
    until="Loops and branches of a graph pass on call-time captures.",
)


@functools.cache
def install() -> None:
    """Make loops and branches capture call-time values from the enclosing graph."""
    PATCH.check()

    def capture(self: Any, closure: Any, spec: Any, key: Any = None, default_value: Any = None) -> Any:
        return self.capture(self.outer_graph.capture_call_time_value(closure, spec, key, default_value))

    for path in _CLASSES:
        internal(path).capture_call_time_value = capture
