"""Imports functions that a config names: `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.user_modules import add_package_of, content, hidden_by, import_users, user_code_has_run

Key = tuple[str | int, ...]

_PREFIX = "_distlaunch_user_"

_sources: dict[str, bytes] = {}
"""Contents of the user's files as they were loaded, by the name of the module."""


def load_function(reference: str, key: Key) -> Callable[..., Any]:
    """Import a function or class.

    Raises:
        ConfigError: there is no such module or name. Errors in the module's code are not caught.
    """
    module_name, _, name = reference.rpartition(":")
    module = _load_file(Path(module_name), key) if module_name.endswith(".py") else _import(module_name, key)
    _restore_process_state(f"importing {module_name}", key)
    function = getattr(module, name, None)
    if not callable(function) and (hidden := hidden_by(module_name)) is not None:
        raise ConfigError(Problem(key, hidden_module(module_name, name, *hidden)))
    if not callable(function):
        raise ConfigError(Problem(key, f"got '{reference}', but {module_name} has no function '{name}'"))
    return function


def call(reference: str, args: Mapping[str, Any], key: Key, *given: Any) -> Any:
    """Load a function and call it.

    Args:
        args: keyword arguments from the config.
        given: positional arguments from distlaunch.

    Raises:
        ConfigError: the function cannot be loaded, or does not take the arguments.
    """
    function = load_function(reference, (*key, "function"))
    try:
        inspect.signature(function).bind(*given, **args)
    except TypeError as error:
        problem = f"{reference}: {error}; its signature is {inspect.signature(function)}"
        raise ConfigError(Problem((*key, "args"), problem)) from None
    result = function(*given, **args)
    _restore_process_state(f"calling {reference}", (*key, "function"))
    return result


def _restore_process_state(what: str, key: Key) -> None:
    """Restore state of this process that a job depends on and the user's code may have changed.

    Raises:
        ConfigError: the user's code has made a change that cannot be undone.
    """
    user_code_has_run()
    tf = sys.modules.get("tensorflow")
    if tf is not None and not tf.executing_eagerly() and not tf.inside_function():
        calls = "`disable_eager_execution()`, `disable_v2_behavior()` or similar calls"
        message = f"{what} has switched off eager execution of TensorFlow, which Keras 3 needs; remove {calls}"
        raise ConfigError(Problem(key, message))


def hidden_module(module: str, name: str, file: Path, loaded: str) -> str:
    """Return the message about a user's module that has the same name as a loaded library."""
    return (
        f"got '{module}:{name}', but {module} is {loaded}, which is already loaded; "
        f"rename {file}, or write '{file}:{name}'"
    )


def imported_files() -> dict[str, str]:
    """Return the user's files by the names under which they were imported; pickled objects contain these names."""
    named = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name: file for name, file in named.items() if name.startswith(_PREFIX) and file}


def forget_changed_files() -> None:
    """Forget each of the user's files whose content has changed since it was loaded, so that it is loaded again.

    A notebook calls this before a training. A task reads each file once, whatever happens to the file later.
    """
    for name, file in imported_files().items():
        if name in _sources and content(file) != _sources[name]:
            del sys.modules[name]


def _import(name: str, key: Key) -> Any:
    try:
        return import_users(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(Problem(key, f"no module named '{error.name}'; it is looked for in sys.path")) from None
        raise


def _load_file(path: Path, key: Key) -> Any:
    if not path.is_file():
        raise ConfigError(Problem(key, f"no such file: {path}"))
    name = f"{_PREFIX}{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    add_package_of(path)
    source = path.read_bytes()
    try:
        # compiled here, because Python's cache does not notice a change within a second that keeps the file's size
        exec(spec.loader.source_to_code(source, str(path)), vars(module))
    except BaseException:
        sys.modules.pop(name, None)  # as `import` does; otherwise a second call would return a part of the module
        raise
    _sources[name] = source
    return module
