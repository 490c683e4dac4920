"""Names that a module binds at its top level, read from its source."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_LARGEST = 8 << 20  # bytes of a file to parse: its tree takes hundreds of times as much memory


class SourceError(Exception):
    """A source file cannot be read; the message contains its name and the line."""


@dataclass
class ModuleNames:
    """The names that a module binds.

    Attributes:
        bound: maps each name to its definition, or to the node that binds it.
        is_open: whether more names may be bound when it runs (star imports, `globals()`, a module's `__getattr__`), or
            it is too large to parse.
        relative: the first `from .name import ...` that runs when the module is imported.
    """

    bound: dict[str, ast.AST] = field(default_factory=dict)
    is_open: bool = False
    relative: ast.ImportFrom | None = None

    def public(self) -> list[str]:
        """Return functions and classes to choose from."""
        definitions = (ast.FunctionDef, ast.ClassDef)
        return [name for name, node in self.bound.items() if isinstance(node, definitions) and not name.startswith("_")]


def read_module(path: Path) -> ModuleNames:
    """Return the names that a file binds at its top level, without running the file.

    Raises:
        SourceError: it cannot be read, or is not valid Python.
    """
    try:
        with path.open("rb") as file:
            source = file.read(_LARGEST + 1)
        if len(source) > _LARGEST:
            # for example, a table in Python syntax: importing it will show the names
            return ModuleNames(is_open=True)
        with warnings.catch_warnings():
            # SyntaxWarnings about the file, such as "invalid escape sequence", are shown when it is imported
            warnings.simplefilter("ignore")
            tree = ast.parse(source, filename=str(path))
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise SourceError(f"{path}{line}: Python cannot read the file: {error.msg}; correct it") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise SourceError(f"{path}: Python cannot read the file: {error or type(error).__name__}; correct it") from None
    names = ModuleNames()
    for node in _top_level(tree.body):
        _bind(node, names)
    # top-level imports are certain to run; in a `try`, another import may follow
    names.relative = next((node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level), None)
    names.is_open = names.is_open or "__getattr__" in names.bound
    return names


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements that run when the module is imported, including those in `if`, `try`, `with` and loops."""
    # a stack instead of recursion: generated files nest deeply
    stack = list(reversed(body))
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        inner: list[ast.stmt] = []
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt):
                inner.append(part)
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                inner += part.body
        stack += reversed(inner)


def _bind(node: ast.stmt, names: ModuleNames) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        # with a second definition, as in `if ...: def f` / `else: def f`, it is unknown which one applies
        names.bound[node.name] = node if node.name not in names.bound else ast.Pass()
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            names.is_open = names.is_open or alias.name == "*"
            # `import a.b` binds `a`
            names.bound[alias.asname or alias.name.partition(".")[0]] = node
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if node.value is None:
                continue  # `name: int` alone binds nothing
            if isinstance(target, ast.Name):
                names.bound[target.id] = node.value if target.id not in names.bound else ast.Pass()
            else:
                _bind_inner(target, names)
    else:
        _bind_inner(node, names)


def _bind_inner(node: ast.AST, names: ModuleNames) -> None:
    """Record names bound by anything else: loops, `with ... as`, walrus, `globals()[...] = ...`."""
    if isinstance(node, ast.Delete):
        return
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.bound.setdefault(inner.id, node)
        elif isinstance(inner, ast.Name) and inner.id in ("globals", "exec", "setattr", "vars", "locals"):
            names.is_open = True
