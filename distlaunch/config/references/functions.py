"""Checks `module:function` references against the source text: the name exists, and accepts the given arguments.

Nothing is imported, so that no user code runs. What cannot be known without running it is assumed to be correct.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from distlaunch.base.errors import Problem
from distlaunch.base.user_modules import package_root
from distlaunch.config.read.words import did_you_mean, listed, show
from distlaunch.config.references.modules import ModuleMissingError, find_source, taken_name
from distlaunch.config.references.signatures import (
    SEED,
    Function,
    argument_problems,
    context_problem,
    map_with_seed,
    position_problem,
)
from distlaunch.config.references.sites import Site, sites
from distlaunch.config.references.source_names import ModuleNames, SourceError, read_module
from distlaunch.config.run import RunConfig

_GIVEN = {"preprocessing": 1}
"""Number of values that distlaunch passes by position, before the config's arguments."""
_BY_NAME = {"augment": (SEED,)}
"""Values that distlaunch passes by name, to a function that takes them."""
_EXAMPLE_FORMS = (("x", "y"), ("example",), ("x", "y", "sample_weight"))
"""Possible forms of examples, which only the data determines; see `data/examples/each_example.py`."""
Forms = Mapping[str, tuple[tuple[str, ...], ...]]
"""Names of the values that distlaunch passes by position, for each role: one tuple for each allowed form."""
_NAMES = ("PyDataset", "keras.utils.Sequence", "utils import Sequence")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
_MOST_FILES = 50


@dataclass(frozen=True)
class Calls:
    """The arguments with which a run calls the functions of its config.

    Attributes:
        gives_context: whether the data function gets `context`.
    """

    forms: Forms
    gives_context: bool


def reference_problems(config: RunConfig) -> list[Problem]:
    """Return problems with the functions that a config names. The config must name files by absolute paths."""
    known: dict[Path, ModuleNames] = {}
    forms = {"map": _EXAMPLE_FORMS, "augment": _EXAMPLE_FORMS, "step": config.strategy.step_forms}
    called = Calls(forms, gives_context=config.data.gives_context)
    found = [problem for site in sites(config) if site.is_reference for problem in _check(site, known, called, config)]
    return [*_batch_size_problems(config), *found]


def _check(site: Site, known: dict[Path, ModuleNames], called: Calls, config: RunConfig) -> Iterator[Problem]:
    module, _, name = site.name.rpartition(":")
    if not module or not name.isidentifier() or (":" in module and not module.endswith(".py")):
        yield Problem(site.key, f"got {show(site.name)}; expected 'package.module:name' or 'path/to/file.py:name'")
        return
    try:
        path = _file(Path(module)) if module.endswith(".py") else find_source(module, config.modules_folder)
        if path is None:
            return
        if path not in known:
            known[path] = read_module(path)
        if module.endswith(".py") and (relative := known[path].relative) is not None:
            yield Problem(site.key, _relative_import(path, relative, name))
            return
    except (ModuleMissingError, SourceError) as error:
        yield Problem(site.key, str(error))
        return
    yield from _check_name(site, name, module, known[path], called)


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    if path.exists():
        raise SourceError(f"{path} is a folder; expected a Python file")
    names = sorted(entry.name for entry in path.parent.glob("*.py")) if path.parent.is_dir() else []
    where = "; paths in a config start from its folder, those of --set from the current directory"
    raise SourceError(f"no such file: {path}{did_you_mean(path.name, names) or where}")


def _relative_import(path: Path, node: ast.ImportFrom, name: str) -> str:
    """Return how to name a file that only works as a module of its package."""
    root = package_root(path) or path.parent.parent
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    line = f"`from {'.' * node.level}{node.module or ''} import ...`"
    # a relative path if the folder is below the current directory
    start = shlex.quote(os.path.relpath(root) if root.is_relative_to(Path.cwd()) else str(root))
    where = "" if root == Path.cwd() or str(root) in sys.path else f", and start with PYTHONPATH={start}"
    return (
        f"{path.name}, line {node.lineno}: {line} works only in a module of a package, not in a file; "
        f"write '{module}:{name}'{where}"
    )


def _check_name(site: Site, name: str, module: str, names: ModuleNames, called: Calls) -> Iterator[Problem]:
    where = Path(module).name if module.endswith(".py") else module
    if name not in names.bound:
        if local := taken_name(module):
            owner = f"{module} is a module of Python or of a package"
            yield Problem(site.key, f"{owner}; rename your file {local}, or write './{local}:{name}'")
        elif not names.is_open:
            functions = names.public()
            hint = did_you_mean(name, functions) or (
                f"; it has {listed(functions, 6)}" if functions else "; it defines nothing"
            )
            yield Problem(site.key, f"{where} has no '{name}'{hint}")
        return
    node = names.bound[name]
    if isinstance(node, ast.AsyncFunctionDef):
        yield Problem(site.key, f"'{name}' is an `async def`; expected a plain function; remove `async`")
    elif isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set):
        yield Problem(site.key, f"'{name}' in {where}, line {node.lineno}, is a value; expected a function or class")
    # a decorator may change the arguments
    elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
        yield from _check_call(site, Function(name, node), called)


def _check_call(site: Site, function: Function, called: Calls) -> Iterator[Problem]:
    if site.role == "map" and SEED in function.by_name:
        yield Problem(site.key, map_with_seed(str(function)))
    elif site.role in called.forms:
        forms = called.forms[site.role]
        messages = [position_problem(function, names, _BY_NAME.get(site.role, ())) for names in forms]
        # one matching form is enough
        if all(messages):
            yield Problem(site.key, str(messages[0]))
    elif site.role == "data" and (message := context_problem(function, given=called.gives_context)):
        yield Problem(site.key, message)
    elif site.args is not None:
        # the config need not name y_true and y_pred, which the training step passes to a loss or metric function
        complete = site.role not in ("losses", "metrics")
        given = _GIVEN.get(site.role, 0)
        args = [*site.args, *["context"] * (site.role == "data" and called.gives_context)]
        for argument, message in argument_problems(function, args, complete=complete, by_position=given):
            key = (*site.args_key, argument) if argument else site.args_key if site.args else site.key
            yield Problem(key, message)


def _batch_size_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if `data.global_batch` is missing and the data function cannot return a `PyDataset`.

    A function may return one if its file, or a file of the user that it imports, mentions `PyDataset`.

    If that cannot be known, the run itself reports a missing batch size once it has read the data.
    """
    function = config.data.function
    if config.data.global_batch is not None or (
        function is not None and _may_give_batches(function, config.modules_folder)
    ):
        return
    message = "missing: expected a whole number of at least 1; add `global_batch:` below `data:`"
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
    except ModuleMissingError:  # reported elsewhere
        return None


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names)


def _neighbour(file: Path, module: str, folder: Path | None) -> Path | None:
    """Return the source of an imported module: the file next to the importing one, else the result of `find_source`."""
    beside = file.parent.joinpath(*module.split(".")).with_suffix(".py")
    if beside.is_file():
        return beside
    with contextlib.suppress(ModuleMissingError, ValueError, ImportError):
        return find_source(module, folder)
    return None
