"""Makes characters visible that would do something to a terminal instead of being shown."""

from __future__ import annotations

import re

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""Characters that change the order in which others are shown."""
_HALVES = "\ud800-\udfff"
"""Halves of characters, which no encoding has."""
_HIDDEN = re.compile(f"[{_CONTROLS}{_DIRECTIONS}{_HALVES}]")


def visible(text: str) -> str:
    """Return a text with control characters, halves and changes of direction written as Python writes them.

    Line breaks and tabs stay. Names, messages and values in files of a run may be another user's.
    """
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
