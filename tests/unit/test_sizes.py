"""Modules and functions stay small enough to read at once."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "distlaunch"
MODULE_LINES, FUNCTION_LINES = 300, 50


def test_no_module_and_no_function_is_long() -> None:
    long: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        name, lines = path.relative_to(PACKAGE), len(text.splitlines())
        if lines > MODULE_LINES:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_LINES:
                    long.append(f"{name}: {node.name}: {lines} lines")
    assert not long, long
