"""`engine:`, the hosts on which the tasks of a run are started: the kinds that the installed packages provide.

The entry points of the group `distlaunch.engines` are scanned when the first config is read, and not at the import of
this module. So the modules of packages that provide engines can import anything of distlaunch.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from functools import reduce
from importlib.metadata import EntryPoint
from operator import or_  # pyright: ignore[reportUnknownVariableType]
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

from pydantic import Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from distlaunch.base.errors import UsageError
from distlaunch.base.plain_types import is_dict
from distlaunch.config.base import Words
from distlaunch.config.engines.base import EngineSection

GROUP = "distlaunch.engines"
"""The entry points by which packages provide engines: kind = module:class of its section."""
DEFAULT = "auto"
_OURS = (DEFAULT, "local", "ssh", "slurm")


def load_kinds(points: Iterable[EntryPoint]) -> tuple[dict[str, type[EngineSection]], dict[str, str]]:
    """Return the section class of each kind, and why the classes of other kinds cannot be used.

    Args:
        points: entry points of the group.
    """
    classes: dict[str, type[EngineSection]] = {}
    unusable: dict[str, str] = {}
    providers: dict[str, EntryPoint] = {}
    for point in sorted(points, key=lambda point: (_rank(point.name), point.name)):
        if point.name in providers:
            first, package = _package_of(providers[point.name]), _package_of(point)
            if first != package:
                both = f"the packages {first} and {package} both provide it; uninstall one of them"
                unusable[point.name] = both
            continue
        providers[point.name] = point
        try:
            classes[point.name] = _checked_class(point)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            package = _package_of(point)
            unusable[point.name] = f"the package {package} provides it, but {point.value} cannot be used: {reason}"
    for kind in unusable:
        classes.pop(kind, None)
    return classes, unusable


def _package_of(point: EntryPoint) -> str:
    # only errors need the name: it is parsed from the package's metadata, which takes longer than loading the class
    return point.dist.name if point.dist is not None else point.module


def _rank(kind: str) -> int:
    return _OURS.index(kind) if kind in _OURS else len(_OURS)


def _checked_class(point: EntryPoint) -> type[EngineSection]:
    """Return the class that an entry point names. Raises TypeError if it is no section of this kind."""
    found = point.load()
    if not (isinstance(found, type) and issubclass(found, EngineSection)):
        raise TypeError("expected a subclass of distlaunch.config.engines.base.EngineSection")
    kinds = get_args(found.model_fields["kind"].annotation)
    if kinds != (point.name,):
        raise TypeError(f"expected the annotation `kind: Literal[{point.name!r}]`, received {kinds!r}")
    if not hasattr(found, "implementation"):
        raise TypeError("expected the class variable `implementation`, the engine as 'module:factory'")
    return found


class Kinds(NamedTuple):
    """The installed engines.

    Attributes:
        models: the section class of each kind.
        unusable: why the classes of other kinds cannot be used.
    """

    models: dict[str, type[EngineSection]]
    unusable: dict[str, str]


@functools.cache
def installed() -> Kinds:
    """Return the engines that are installed.

    Raises:
        UsageError: the engines of distlaunch itself are not installed.
    """
    found = Kinds(*load_kinds(importlib.metadata.entry_points(group=GROUP)))
    if any(kind not in found.models for kind in _OURS):
        raise UsageError(
            "the engines of distlaunch itself are not installed: the metadata of the package is older than its files; "
            "install it again, for example with `pip install -e .`"
        )
    return found


def _kind_of(section: object) -> str | None:
    """Return the kind of a section, given as a dict from the config or as a pydantic object; None if it has none."""
    kind: Any = section.get("kind", DEFAULT) if is_dict(section) else getattr(section, "kind", None)
    return kind if isinstance(kind, str) else None


class AnyEngine:
    """The type of the key `engine`: the union of the installed section classes, which is made at its first use."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = [Annotated[model, Tag(kind)] for kind, model in installed().models.items()]
        union = reduce(or_, members)  # pyright: ignore[reportUnknownArgumentType]
        return handler.generate_schema(Annotated[union, Discriminator(_kind_of)])


if TYPE_CHECKING:
    Engine = EngineSection
else:
    Engine = Annotated[AnyEngine, Words("a section with 'kind', such as {kind: local}")]
