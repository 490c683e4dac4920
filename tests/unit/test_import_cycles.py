"""Imports of distlaunch's modules form no cycle, even within functions; imports only for types do not count."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import distlaunch

ROOT = Path(distlaunch.__file__).parent


def module_of(path: Path) -> str:
    return ".".join(("distlaunch", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports below a node, except those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imports(child)


def names(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that a statement may import. An imported name counts as well, because it may be a module."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    assert statement.module is not None, "no relative import"
    return [statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)]


def test_no_import_cycle() -> None:
    modules = {module_of(path): path for path in ROOT.rglob("*.py")}
    graph = {
        module: {name for each in imports(ast.parse(path.read_text())) for name in names(each)} & modules.keys()
        for module, path in modules.items()
    }
    assert len(graph) > 300
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"an import cycle: {' <- '.join(error.args[1])}") from None
