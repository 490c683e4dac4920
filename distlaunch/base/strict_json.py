"""JSON without bare NaN and Infinity, which Python writes and standard readers reject: strings stand for them."""

from __future__ import annotations

import json
import math
from typing import Any

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: Any, **options: Any) -> str:
    """As `json.dumps`, with `"nan"`, `"inf"` and `"-inf"` for numbers that JSON does not have."""
    return json.dumps(named(value), allow_nan=False, **options)


def named(value: Any) -> Any:
    """Plain data with the names of those numbers in their place."""
    if isinstance(value, dict):
        return {key: named(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [named(inner) for inner in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> Any:
    """The inverse of `named` for one value that is a number, or its name; anything else stays as it is."""
    return _NAMES.get(value, value) if isinstance(value, str) else value
