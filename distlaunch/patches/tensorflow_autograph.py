"""Keeps the code that AutoGraph generates in memory, and records the user's lines that it comes from."""

from __future__ import annotations

import functools
import importlib
import itertools
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

from distlaunch.base.code_origins import PREFIX, Origin, origins
from distlaunch.patches.symbols import Patch, Symbol, internal

_API = "tensorflow.python.autograph.impl.api"
_CONVERTER = "tensorflow.python.autograph.core.converter"
_LOADER = "tensorflow.python.autograph.pyct.loader"

PATCH = Patch(
    symbols=(
        Symbol(f"{_LOADER}.load_source", "(source, delete_on_exit)"),
        Symbol(f"{_API}._TRANSPILER.transform", "(obj, user_context)"),
        Symbol(f"{_CONVERTER}.ProgramContext", "(options, autograph_module=None)"),
        Symbol(f"{_LOADER}.load_ast", "(nodes, indentation='  ', include_source_map=False, delete_on_exit=True)"),
    ),
    why="AutoGraph writes the code that it generates into files, which remain if the process is killed, and tracebacks "
    "name their lines instead of the user's.",
    until="AutoGraph keeps its code in memory, and its errors name the user's lines.",
)

_numbers = itertools.count()  # modules of generated code need unique names in `sys.modules`


@functools.cache
def keep_in_memory() -> None:
    """Make AutoGraph keep its code in memory instead of files."""
    PATCH.check()
    loader = internal(_LOADER)
    load_ast = loader.load_ast
    loader.load_source = _load_source
    loader.load_ast = functools.partial(_load_ast, load_ast)


def _load_source(source: str, delete_on_exit: bool) -> tuple[types.ModuleType, str]:
    name = f"{PREFIX}{next(_numbers)}"
    file = f"{name}.py"
    # tracebacks and `inspect` find the text here; without a time they never check the disk
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    exec(compile(source, file, "exec"), module.__dict__)
    # as in TensorFlow: `inspect` finds a function's source through its module
    sys.modules[name] = module
    return module, file


def _load_ast(load_ast: Callable[..., Any], nodes: Any, *args: Any, **kwargs: Any) -> Any:
    module, source, source_map = load_ast(nodes, *args, **kwargs)
    for generated, origin in (source_map or {}).items():
        place = origin.loc
        origins[generated.filename, generated.lineno] = Origin(
            place.filename, place.lineno, origin.function_name or "<lambda>", (origin.source_code_line or "").strip()
        )
    return module, source, source_map


def convert_ahead(place: str, *, entry: bool = False) -> None:
    """Convert a function now, so that tracing it needs no conversion later. Nothing is traced or run.

    AutoGraph caches conversions by the function's code object, which exists from the start even for a nested function.
    Measured: each of two workers would convert 22 of our functions before the first step, in 1 s of CPU time.

    Args:
        place: such as `package.module:Class.method.<locals>.function`.
        entry: whether `tf.function` or `tf.data` gets the function itself; otherwise a converted function calls it.
    """
    keep_in_memory()
    module, _, name = place.partition(":")
    outer, *inner = name.split(".<locals>.")
    found = functools.reduce(getattr, outer.split("."), importlib.import_module(module))
    converter = internal(_CONVERTER)
    options = converter.ConversionOptions(recursive=True, user_requested=entry, optional_features=None)
    for code in _codes(found.__code__, inner):
        # empty cells: conversion reads the code and the names, not the values
        cells = tuple(types.CellType() for _ in code.co_freevars)
        function = types.FunctionType(code, found.__globals__, code.co_name, None, cells)
        internal(_API)._TRANSPILER.transform(function, converter.ProgramContext(options=options))


def _codes(code: types.CodeType, names: list[str]) -> list[types.CodeType]:
    """Return the code of the nested functions that the names lead to; several, because all lambdas share a name."""
    if not names:
        return [code]
    within = [const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == names[0]]
    return [found for each in within for found in _codes(each, names[1:])]
