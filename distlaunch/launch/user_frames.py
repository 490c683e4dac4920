"""Begins a traceback where the user's own code begins: the frames above are of no use to them."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_FRAME = re.compile(r'\s*File "([^"]+)", line \d+')
_BEGIN = "Traceback (most recent call last)"
_OTHERS = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)


def from_own_code(lines: Sequence[str]) -> list[str]:
    """The lines from the first frame of the user's code on, in the last of several exceptions; all if there is none."""
    begin = max((number for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=-1) + 1
    frames = ((number, _FRAME.match(line)) for number, line in enumerate(lines[begin:], begin))
    own = (number for number, match in frames if match and _is_own(match[1]))
    return list(lines[next(own, 0) :])


def _is_own(path: str) -> bool:
    inside = any(path.startswith(f"{folder}/") for folder in _OTHERS)
    return not (inside or path.startswith("<") or "-packages/" in path)
