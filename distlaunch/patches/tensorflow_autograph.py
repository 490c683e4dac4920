"""Keeps the code that AutoGraph generates in memory, and notes which lines of the user's it stands for."""

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
    why="AutoGraph writes the code that it generates into files, which a process that is killed leaves behind, and "
    "tracebacks name their lines instead of the user's.",
    until="AutoGraph keeps its code in memory, and its errors name the user's lines.",
)

_numbers = itertools.count()  # modules of generated code need names of their own in `sys.modules`


@functools.cache
def keep_in_memory() -> None:
    """From here on AutoGraph writes no files."""
    PATCH.check()
    loader = internal(_LOADER)
    load_ast = loader.load_ast
    loader.load_source = _load_source
    loader.load_ast = functools.partial(_load_ast, load_ast)


def _load_source(source: str, delete_on_exit: bool) -> tuple[types.ModuleType, str]:
    name = f"{PREFIX}{next(_numbers)}"
    file = f"{name}.py"
    # tracebacks and `inspect` look for the text there; without a time it is never looked for on disk
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    exec(compile(source, file, "exec"), module.__dict__)
    # as TensorFlow does: `inspect` finds a function's source through its module
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
    """Converts a function now, so that tracing it needs no conversion later. Nothing is traced, or run.

    AutoGraph keeps what it has converted by the function's code, which a function within another has from the start.
    Measured: with two workers, it converts 22 functions of ours in each before the first step, which takes 1 s of CPU.

    Args:
        place: such as `package.module:Class.method.<locals>.function`.
        entry: `tf.function` or `tf.data` is given the function itself; else a converted one calls it.
    """
    keep_in_memory()
    module, _, name = place.partition(":")
    outer, *inner = name.split(".<locals>.")
    found = functools.reduce(getattr, outer.split("."), importlib.import_module(module))
    converter = internal(_CONVERTER)
    options = converter.ConversionOptions(recursive=True, user_requested=entry, optional_features=None)
    for code in _codes(found.__code__, inner):
        # empty ones: conversion reads the code and the names, not the values
        cells = tuple(types.CellType() for _ in code.co_freevars)
        function = types.FunctionType(code, found.__globals__, code.co_name, None, cells)
        internal(_API)._TRANSPILER.transform(function, converter.ProgramContext(options=options))


def _codes(code: types.CodeType, names: list[str]) -> list[types.CodeType]:
    """The codes of functions of a name within another; lambdas all have the same."""
    if not names:
        return [code]
    within = [const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == names[0]]
    return [found for each in within for found in _codes(each, names[1:])]
