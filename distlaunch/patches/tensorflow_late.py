"""Imports TensorFlow when a process first needs it, because tasks on JAX may never need it.

In modules that such tasks import, `tf` takes the place of `import tensorflow as tf`. They ask `is_a()` whether a value
belongs to TensorFlow, and mark functions with `not_converted()`, since neither imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from distlaunch.patches.symbols import Patch, Symbol

if TYPE_CHECKING:
    import tensorflow as tf
else:

    class _Late:
        """Stands for TensorFlow, which the first access to an attribute imports."""

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("tensorflow"), name)

    tf = _Late()

__all__ = ["is_a", "is_imported", "not_converted", "tf", "when_imported"]

PATCH = Patch(
    symbols=(Symbol("tensorflow.python.autograph.impl.api.is_autograph_artifact", "(entity)"),),
    why="`tf.autograph.experimental.do_not_convert` imports TensorFlow where a function is defined. The mark by which "
    "AutoGraph recognizes such a function has no public name.",
    until="Python can import modules lazily (PEP 810).",
)

_NAME = "tensorflow"
_MARK = "autograph_info__"
Function = TypeVar("Function", bound=Callable[..., Any])


def is_imported() -> bool:
    """Return whether this process has imported TensorFlow."""
    module = sys.modules.get(_NAME)
    # while another thread imports TensorFlow, no value belongs to it yet
    return module is not None and hasattr(module, "Tensor") and hasattr(module, "__version__")


def is_a(value: Any, *names: str) -> TypeGuard[Any]:
    """Return whether a value is an instance of a class of TensorFlow, such as `Tensor` or `data.Dataset`."""
    if not is_imported():
        return False
    tensorflow = sys.modules[_NAME]
    return isinstance(value, tuple(operator.attrgetter(name)(tensorflow) for name in names))


def not_converted(function: Function) -> Function:
    """Return a function that AutoGraph does not convert, like `tf.autograph.experimental.do_not_convert`."""
    made: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_imported():
            return function(*args, **kwargs)
        if not made:
            made.append(tf.autograph.experimental.do_not_convert(function))
        return made[0](*args, **kwargs)

    setattr(call, _MARK, None)
    return call  # pyright: ignore[reportReturnType]


def when_imported(action: Callable[[], object]) -> None:
    """Call a function after the import of TensorFlow: now, if it is imported already.

    Actions are called in the order in which they are given. An action that is given again is called once more only if
    TensorFlow is imported already.
    """
    if is_imported():
        action()
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
    if finder is None:
        finder = _Finder()
        # before Python's own finders, which would find the module first
        sys.meta_path.insert(0, finder)
    if action not in finder.actions:
        finder.actions.append(action)


class _Finder(MetaPathFinder):
    """Finds TensorFlow with the finders of Python, and wraps its loader."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], object]] = []
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # the search below calls this finder again
        if fullname != _NAME or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """Loads with the original loader, then calls the actions."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # resources of the module are found through its own loader
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for action in self._finder.actions:
            action()
