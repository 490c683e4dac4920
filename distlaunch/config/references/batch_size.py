"""Decides if `data.global_batch` may be left out: only where a data function may return a `keras.utils.PyDataset`."""

from __future__ import annotations

import ast
import contextlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from distlaunch.base.errors import Problem
from distlaunch.config.references.modules import ModuleMissingError, find_source
from distlaunch.config.run import RunConfig

_NAMES = ("PyDataset", "keras.utils.Sequence", "utils import Sequence")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
_MOST_FILES = 50


def batch_size_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if no file of the user's that the data function is in, or imports, names a `PyDataset`.

    Where that cannot be known, the run says so once it has read the data.
    """
    function = config.data.function
    if config.data.global_batch is not None or (
        function is not None and _may_give_batches(function, config.modules_folder)
    ):
        return
    message = "missing; expected a whole number of at least 1; add `global_batch:` below `data:`"
    yield Problem(("data", "global_batch"), message)


def _may_give_batches(reference: str, folder: Path | None) -> bool:
    module = reference.rpartition(":")[0]
    waiting, seen = [_source(module, folder)], set[Path]()
    while waiting:
        path = waiting.pop()
        if path is None or len(seen) > _MOST_FILES:
            return True
        if path in seen or str(path).startswith(_INSTALLED):
            continue
        seen.add(path)
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            return True
        if any(name in text for name in _NAMES):
            return True
        waiting += [file for name in _imported(tree) if (file := _neighbour(path, name, folder)) is not None]
    return False


def _source(module: str, folder: Path | None) -> Path | None:
    if module.endswith(".py"):
        return Path(module)
    try:
        return find_source(module, folder)
    except ModuleMissingError:  # which is reported by itself
        return None


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names)


def _neighbour(file: Path, module: str, folder: Path | None) -> Path | None:
    """Return the source of a module beside a file, or of any that is not installed; None if there is none to read."""
    beside = file.parent.joinpath(*module.split(".")).with_suffix(".py")
    if beside.is_file():
        return beside
    with contextlib.suppress(ModuleMissingError, ValueError, ImportError):
        return find_source(module, folder)
    return None
