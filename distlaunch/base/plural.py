"""Numbers of things in sentences."""

from __future__ import annotations


def count(how_many: int, noun: str) -> str:
    """`1 step`, `1,234 steps`."""
    plural = "es" if noun.endswith(("ss", "batch")) else "s"  # but "epochs"
    return f"{how_many:,} {noun}{'' if how_many == 1 else plural}"
