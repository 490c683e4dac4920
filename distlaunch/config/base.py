"""Common base of config models: unknown keys are errors, values are not converted, nothing changes after loading."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Section(BaseModel):
    """A part of the config. Its traits tell which of its keys determine the numbers of a run."""

    # strict: pydantic would convert "3" to 3; the messages say what to write instead
    # deferred: most commands use few sections, and the installed engines are found when a config is read
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, defer_build=True)

    is_neutral: ClassVar[bool] = False
    """True if no key of the section affects the numbers: its keys control where the work runs, or what is kept and
    reported."""
    neutral_keys: ClassVar[frozenset[str]] = frozenset()
    """The keys that do not affect the numbers, in a section whose other keys do."""

    def number_keys(self, key: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        """Yield the keys of this section and of its nested sections that affect the numbers.

        Args:
            key: the key of this section.
        """
        for name in () if self.is_neutral else type(self).model_fields:
            if name not in self.neutral_keys:
                value = getattr(self, name)
                if isinstance(value, Section):
                    yield from value.number_keys((*key, name))
                else:
                    yield *key, name

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each key with the docstring below it.

        Pydantic's `use_attribute_docstrings` would parse the source of all sections in each command, although only the
        schema needs it.
        """
        made = handler(schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for name, text in _attribute_docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return made


def _attribute_docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstrings of the attributes of a class and of its bases."""
    found: dict[str, str] = {}
    for cls in reversed([each for each in section.__mro__ if issubclass(each, Section)]):
        try:
            source = textwrap.dedent(inspect.getsource(cls))
        except OSError:
            continue  # created by a call, without source code
        body = cast(ast.ClassDef, ast.parse(source).body[0]).body
        for attribute, below in itertools.pairwise(body):
            if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[attribute.target.id] = inspect.cleandoc(text)
                    case _:  # a subclass that declares the attribute again needs its own description
                        found.pop(attribute.target.id, None)
    return found


@dataclass(frozen=True)
class Words:
    """Description of a type, used in messages; part of the type's annotation."""

    text: str


Positive = Annotated[int, Field(ge=1)]
OneLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$"), Words("text in one line")]
PositiveMinutes = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
FunctionRef = Annotated[
    str,
    Field(
        # `package.module:function`, or anything that ends with .py before the colon
        pattern=r"^([A-Za-z_][\w.]*|[\s\S]+\.py):[A-Za-z_]\w*$",
        description="`package.module:function` or `path/to/file.py:function` (relative to the config file)",
    ),
    Words("a function, as 'package.module:function' or 'path/to/file.py:function'"),
]
Arguments = Annotated[dict[str, Any], Field(default_factory=dict), Words("a mapping of arguments, such as {units: 64}")]
