"""Formats values and choices in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from distlaunch.base.plain_types import is_dict, is_list

_LONGEST = 60  # characters of a value in a message
SHOWN = _LONGEST - 3
"""Number of characters of a long value that are shown."""


def show(value: Any) -> str:
    """Return a value in the words of a message: `'adam'`, `3`, `true`, `nothing (null)`, `a list of 3`."""
    if value is None:
        return "nothing (null)"
    # before int, of which bool is a subclass
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST else value[:SHOWN] + "...")
    if is_dict(value):
        return f"a mapping with {listed(value)}" if value else "an empty mapping {}"
    if is_list(value):
        return f"a list of {len(value)}" if value else "an empty list []"
    return str(value)


def kind_of(value: Any) -> str:
    """Return the YAML type of the value, to distinguish `'3'` from `3`; empty if `show` makes it clear."""
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a decimal number"
    return "text" if isinstance(value, str) else ""


def received(value: Any) -> str:
    """Return words such as `got '3' (text)`."""
    kind = kind_of(value)
    return f"got {show(value)} ({kind})" if kind else f"got {show(value)}"


def listed(words: Iterable[Any], most: int = 12) -> str:
    """Return `'a', 'b', 'c'`, with at most `most` of the words."""
    quoted = [repr(word) for word in words]
    return ", ".join(quoted if len(quoted) <= most else [*quoted[:most], f"... ({len(quoted)} in all)"])


def either(words: Iterable[str]) -> str:
    """Return `a, b or c`."""
    parts = list(words)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def all_of(words: Iterable[str]) -> str:
    """Return `a, b and c`."""
    parts = list(words)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def closest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the option that was most likely meant, ignoring case; None if none is similar."""
    if len(word) > _LONGEST:
        return None
    folded: dict[str, str] = {}
    for option in options:
        folded.setdefault(_fold(option), option)
    slips = [option for option in folded if _is_slip(_fold(word), option)]
    found = slips or difflib.get_close_matches(_fold(word), folded, n=1, cutoff=cutoff)
    return folded[found[0]] if found else None


def _is_slip(word: str, meant: str) -> bool:
    """Return True if the words differ only in two swapped neighboring letters, the most frequent typing error."""
    if len(word) != len(meant):
        return False
    differ = [at for at, pair in enumerate(zip(word, meant, strict=True)) if pair[0] != pair[1]]
    if len(differ) != 2 or differ[1] != differ[0] + 1:
        return False
    first, second = differ
    return word[first] == meant[second] and word[second] == meant[first]


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'mirrored'?`, or an empty string."""
    found = closest(word, options)
    return f"; did you mean '{found}'?" if found is not None else ""


def _fold(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")
