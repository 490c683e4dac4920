"""Numbers of things in sentences, and lists of them."""

from __future__ import annotations

from collections.abc import Sequence


def count(how_many: int, noun: str) -> str:
    """`1 step`, `1,234 steps`."""
    plural = "es" if noun.endswith(("ss", "batch")) else "s"  # but "epochs"
    return f"{how_many:,} {noun}{'' if how_many == 1 else plural}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """`a, b, c`, and of more than `most`, `a, b and 1,234 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; empty for none."""
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + [*words[-1:]])
