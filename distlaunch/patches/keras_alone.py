"""Takes a model out of its `tf.distribute` strategy temporarily, and runs its methods in a context."""

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
    why="A model predicts and evaluates with the strategy that it was created under, in all of the strategy's "
    "processes, but a callback calls the model in one process only.",
    until="Keras lets a model predict without the strategy that it was created under.",
)

_STRATEGY = "_distribute_strategy"
_TRACED = ("predict_function", "test_function")
Functions = dict[tuple[int, str], Any]
"""Traced functions of a model and its submodels, by their `id` and the attribute's name."""


@contextmanager
def alone(model: keras.Model, functions: Functions) -> Iterator[None]:
    """Make a model and its submodels compute without a strategy, in this context.

    Args:
        functions: functions traced in earlier contexts, to which this context adds those that it traces.
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
def call_methods_within(
    model: keras.Model, methods: Iterable[str], context: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Make calls of these methods of a model and its submodels run in `context`, until the block ends."""
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
