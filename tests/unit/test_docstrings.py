"""`Args:` and `Attributes:` contain only names that exist; they are easily forgotten when something is renamed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import distlaunch

PACKAGE = Path(distlaunch.__file__).parent


def documented(doc: str, section: str) -> list[str]:
    """Names in a section of a docstring in Google style; several with one text are separated by commas."""
    found = re.search(rf"^{section}:\n((?: {{4}}.*(?:\n|$)|\n)+)", doc, flags=re.MULTILINE)
    entries = re.findall(r"^ {4}(\S[^:]*):", found.group(1), flags=re.MULTILINE) if found else []
    names = [name.strip().strip("`*") for entry in entries for name in entry.split(",")]
    return [name for name in names if name.isidentifier()]


def arguments(function: ast.FunctionDef) -> set[str]:
    given = function.args
    starred = [each for each in (given.vararg, given.kwarg) if each is not None]
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *starred)}


def members(node: ast.ClassDef) -> set[str]:
    """Everything that is assigned or defined in a class, in its methods too."""
    inside = list(ast.walk(node))
    names = {each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    names |= {each.attr for each in inside if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}
    return names | {each.name for each in inside if isinstance(each, ast.FunctionDef)}


def unknown_names(tree: ast.Module, inherited: dict[str, set[str]]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from set(documented(ast.get_docstring(node) or "", "Args")) - arguments(node)
        elif isinstance(node, ast.ClassDef):
            doc = ast.get_docstring(node) or ""
            known = members(node).union(*(inherited.get(ast.unparse(base), set()) for base in node.bases))
            yield from set(documented(doc, "Attributes")) - known
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield from set(documented(doc, "Args")) - arguments(method)


def test_they_name_what_exists() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    classes = {node.name: members(node) for tree in trees.values() for node in ast.walk(tree)
               if isinstance(node, ast.ClassDef)}  # fmt: skip
    wrong = {str(path.relative_to(PACKAGE)): found for path, tree in trees.items()
             if (found := list(unknown_names(tree, classes)))}  # fmt: skip
    assert not wrong
