"""JSON with strings in place of NaN and Infinity.

Python's `json` writes `NaN` and `Infinity`, which standard readers reject.
"""

from __future__ import annotations

import json
import math
from typing import Any

from distlaunch.base.plain_types import is_dict, is_list, is_tuple

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: Any, **options: Any) -> str:
    """Serialize like `json.dumps`, with `"nan"`, `"inf"` and `"-inf"` for numbers that JSON does not have."""
    return json.dumps(named(value), allow_nan=False, **options)


def named(value: Any) -> Any:
    """Replace numbers that JSON does not have by their names in plain data."""
    if is_dict(value):
        return {key: named(inner) for key, inner in value.items()}
    if is_list(value) or is_tuple(value):
        return [named(inner) for inner in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> Any:
    """Return the number for one of these names; any other value is returned unchanged."""
    return _NAMES.get(value, value) if isinstance(value, str) else value
