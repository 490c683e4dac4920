"""What all config models share: unknown keys are errors, values are not converted, nothing changes after loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the config. Its traits say which of its keys decide the numbers of a run."""

    # strict: pydantic would take "3" for 3; the messages say what to write instead
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, use_attribute_docstrings=True
    )

    is_neutral: ClassVar[bool] = False
    """Whether no key of the section decides a number: they say where the work runs, or what is kept and reported."""
    neutral_keys: ClassVar[frozenset[str]] = frozenset()
    """The keys of the section that decide no number, where others do."""

    def number_keys(self, key: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        """Yield the keys below this section, which is at `key`, that decide numbers; those of sections in it, too."""
        for name in () if self.is_neutral else type(self).model_fields:
            if name not in self.neutral_keys:
                value = getattr(self, name)
                if isinstance(value, Section):
                    yield from value.number_keys((*key, name))
                else:
                    yield *key, name


@dataclass(frozen=True)
class Words:
    """Says in a type's annotation what messages call it."""

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
