"""Takes a model out of its `tf.distribute` strategy for a while, and gives its methods a context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras

from distlaunch.patches.keras_private import layers_of
from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(
        Symbol("keras.Layer._flatten_layers", "(self, include_self=True, recursive=True, ...)"),
        Symbol("keras.Model.make_predict_function", "(self, force=False)"),
        Symbol("keras.Model.make_test_function", "(self, force=False)"),
    ),
    why="A model predicts and evaluates with the strategy that it was made under, in all of its processes, but a "
    "callback of one process does so alone.",
    until="Keras lets a model predict without the strategy that it was made under.",
)

_STRATEGY = "_distribute_strategy"
_TRACED = ("predict_function", "test_function")
Functions = dict[tuple[int, str], Any]
"""Traced functions of a model and the models within it, by their identity and the attribute's name."""


@contextmanager
def alone(model: keras.Model, functions: Functions) -> Iterator[None]:
    """Within it, a model and the models within it compute without a strategy.

    Args:
        functions: what was traced in earlier ones, and takes what is traced in this one.
    """
    PATCH.check()
    before = []
    for one in _models(model):
        before += [(one, name, getattr(one, name)) for name in (_STRATEGY, *_TRACED) if hasattr(one, name)]
    try:
        for one, name, _ in before:
            object.__setattr__(one, name, functions.get((id(one), name)))
        yield
    finally:
        for one, name, value in before:
            if name in _TRACED:
                functions[id(one), name] = getattr(one, name)
            object.__setattr__(one, name, value)


@contextmanager
def calling_within(
    model: keras.Model, methods: Iterable[str], context: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Within it, these methods of a model and the models within it run in a context."""
    models, methods = list(_models(model)), list(methods)

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with context():
                return method(*args, **kwargs)

        return call

    for one in models:
        for name in methods:
            object.__setattr__(one, name, wrapped(getattr(one, name)))
    try:
        yield
    finally:
        for one in models:
            for name in methods:
                object.__delattr__(one, name)


def _models(model: keras.Model) -> Iterator[keras.Model]:
    return (layer for layer in layers_of(model) if isinstance(layer, keras.Model))
