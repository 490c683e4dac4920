"""Counts the places outside a strategy's own files that depend on its kind; CI fails above the limit.

A place is a comparison with the name of a strategy or of a backend, an `isinstance` or a `match` case of a strategy's
config class, or a table keyed by kind. The strategies' own files are `config/strategies/` and the folders below
`strategies/`. What is a default, or text for people, does not count.

    python scripts/count_kinds.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from distlaunch.config.strategies import MODELS

LIMIT = 5
PACKAGE = Path(__file__).parents[1] / "distlaunch"
CLASSES = {model.__name__ for model in MODELS.values()} | {"Mesh"}
NAMES = {*MODELS, *(model.backend for model in MODELS.values())}


def is_own(path: Path) -> bool:
    """Return whether a file belongs to a strategy."""
    parts = path.relative_to(PACKAGE).parts
    return parts[:2] == ("config", "strategies") or (parts[0] == "strategies" and len(parts) > 2)


def places(tree: ast.AST) -> Iterator[int]:
    """Lines that depend on the kind of a strategy."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            # `"jax" in sys.modules` asks for a package
            asked = [*(part for part in [node.left, *node.comparators] for part in ast.walk(part))]
            if any(_is_name(part) for part in asked) and "modules" not in ast.dump(node):
                yield node.lineno
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            if any(isinstance(part, ast.Name) and part.id in CLASSES for part in ast.walk(node.args[1])):
                yield node.lineno
        elif isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name) and node.cls.id in CLASSES:
            yield node.cls.lineno
        elif isinstance(node, ast.Dict) and node.keys and all(key is not None and _is_name(key) for key in node.keys):
            yield node.lineno


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in NAMES


def main() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not is_own(path)
        for line in places(ast.parse(path.read_text()))
    ]
    print(f"{len(found)} places outside the strategies' own files depend on the kind of a strategy (at most {LIMIT}):")
    print("\n".join(found))
    sys.exit(len(found) > LIMIT)


if __name__ == "__main__":
    main()
