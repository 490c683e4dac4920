"""Makes control characters visible, because they would otherwise change the state of a terminal."""

from __future__ import annotations

import re

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""Characters that change the direction of text."""
_HALVES = "\ud800-\udfff"
"""Lone surrogates, which cannot be encoded."""
_HIDDEN = re.compile(f"[{_CONTROLS}{_DIRECTIONS}{_HALVES}]")


def visible(text: str) -> str:
    """Return a text with Python escapes in place of control characters, direction marks and lone surrogates.

    Line breaks and tabs stay. Names, messages and values in the files of a run may come from another user.
    """
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
