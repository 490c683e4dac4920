"""Records of framework internals that distlaunch depends on, the check that a version has them, and replacements."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distlaunch.base.compat import TESTED, install_command, installed
from distlaunch.base.errors import FrameworkError


@dataclass(frozen=True)
class Symbol:
    """A part of a framework.

    Attributes:
        path: such as `keras.src.ops.cond`.
        parameters: parameters as `inspect.signature` prints them without types, with `...` for any others; None if the
            part is not a function and only has to exist.
    """

    path: str
    parameters: str | None = None

    def get(self) -> Any:
        """Return the part itself, as it was when it was first requested.

        Raises:
            FrameworkError: the installed version has no such part.
        """
        return _checked(self)


@dataclass(frozen=True)
class Patch:
    """A change to a framework, or a use of its private parts.

    Attributes:
        symbols: what it replaces, overrides or calls.
        why: what is wrong or missing without it.
        until: what would make it unnecessary.
    """

    symbols: tuple[Symbol, ...]
    why: str
    until: str

    def check(self) -> None:
        """Check the symbols. Call it before anything is replaced.

        Raises:
            FrameworkError: the installed version does not fit.
        """
        for symbol in self.symbols:
            symbol.get()


@functools.cache  # a part must be checked before it is replaced
def _checked(symbol: Symbol) -> Any:
    found = internal(symbol.path)
    if symbol.parameters is not None:
        given = _parameters_of(found)
        # a class, a constant, or a C function without a signature
        if given is None:
            raise _unfit(symbol.path, "is not a function")
        if not _fit(given, symbol.parameters):
            raise _unfit(symbol.path, f"takes {given}, expected {symbol.parameters}")
    return found


def _fit(given: str, expected: str) -> bool:
    if "..." not in expected:
        return given == expected
    left = iter(given[1:-1].split(", "))
    return all(part in left for part in expected[1:-1].split(", ") if part != "...")  # in this order


def internal(path: str) -> Any:
    """Return a module of a framework, or a part of one. Private modules are only imported by this function.

    Raises:
        FrameworkError: the installed version has no such part.
    """
    top, *names = path.split(".")
    found, at = importlib.import_module(top), top
    for name in names:
        at = f"{at}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            if not inspect.ismodule(found):
                raise _unfit(path, "does not exist") from None
            try:
                found = importlib.import_module(at)
            except ImportError:
                raise _unfit(path, "does not exist") from None
    return found


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of a framework's object.

    Raises:
        FrameworkError: this version has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        # the object's class may be the user's, so the message names the framework's class above it
        homes = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(owner).__mro__)
        home = next((home for home in homes if home.partition(".")[0] in TESTED), None)
        if home is None:
            raise
        raise _unfit(f"{home}.{name}", "does not exist") from None


@contextmanager
def replaced_attributes(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes in this context, and then set them back.

    Args:
        replacements: owners, names of the attributes, and new values.

    Raises:
        FrameworkError: this version of a framework has no such attribute.
    """
    replacements = list(replacements)
    before = [(owner, name, private(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _parameters_of(function: Any) -> str | None:
    """Return the parameters of a function as text, without types, or None if it is not a function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return str(inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters]))


def _unfit(path: str, what: str) -> FrameworkError:
    package = path.partition(".")[0]
    version = installed(package) or getattr(sys.modules.get(package), "__version__", "of an unknown version")
    return FrameworkError(
        f"{package} {version}",
        f"{path} {what}; distlaunch changes or uses this part of {package}, so this version cannot be used here; "
        f"install a tested version: {install_command(package)}",
    )
