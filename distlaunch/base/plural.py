"""Formats counts and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def count(how_many: int, noun: str) -> str:
    """Return a number with its noun: `1 step`, `1,234 steps`."""
    plural = "es" if noun.endswith(("ss", "batch")) else "s"  # not all nouns in "ch": "epochs"
    return f"{how_many:,} {noun}{'' if how_many == 1 else plural}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Join words as `a, b, c`, or as `a, b and 1,234 more` if there are more than `most`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def joined(words: Sequence[str]) -> str:
    """Join words as `a`, `a and b`, `a, b and c`; no words give an empty string."""
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + [*words[-1:]])
