"""Shortens a traceback to the part that helps the user: from their own code to the call that leaves it."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+)')
_BEGIN = "Traceback (most recent call last)"
_CRASH = "Fatal Python error"
_OTHERS = (
    str(Path(__file__).parents[2]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)


def shortened(lines: Sequence[str], limit: int) -> list[str]:
    """Return the lines from the user's first frame on, in the last of several exceptions; all if there is none.

    Args:
        limit: maximum number of lines; the last ones and the user's last frame are kept.
    """
    # a chain of exceptions has several tracebacks, and the last is what ended the task
    begin = max((number for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=-1) + 1
    own = [begin + number for number in _own_frames(lines[begin:])]
    kept = list(lines[own[0] if own else 0 :])
    if len(kept) <= limit:
        return kept
    if not own or own[-1] >= len(lines) - limit:
        return kept[-limit:]
    place = lines[own[-1] : own[-1] + 2]
    return [*place, "    ...", *lines[-(limit - len(place) - 1) :]]


def own_place(lines: Sequence[str]) -> tuple[str, int] | None:
    """Return file and line of the user's code that an exception or a crash left; None if it has no part in it.

    Of several exceptions, the last one in which it has counts.
    """
    own = _own_frames(lines)
    if not own:
        return None
    is_crash = any(line.startswith(_CRASH) for line in lines)  # the last call comes first there
    match = _FRAME.match(lines[own[0 if is_crash else -1]])
    assert match is not None
    return match[1], int(match[2])


def last_own_place(lines: Sequence[str]) -> str:
    """Return the user's last line in the last of several exceptions as `bug.py:15`, or an empty string.

    It is the file's name alone: the path is in the traceback above.
    """
    begin = max((number for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=-1) + 1
    place = own_place(lines[begin:])
    return f"{Path(place[0]).name}:{place[1]}" if place is not None else ""


def own_folders(lines: Sequence[str]) -> set[Path]:
    """Return the folders of the user's files in a traceback."""
    return {Path(match[1]).parent for number in _own_frames(lines) if (match := _FRAME.match(lines[number]))}


def of_crash(lines: Sequence[str]) -> list[str]:
    """Parse the output of faulthandler for a signal that kills Python.

    Returns:
        Nothing if there was no crash. The last call comes first; what called the user's code is left out.
    """
    crash = max((number for number, line in enumerate(lines) if line.startswith(_CRASH)), default=None)
    if crash is None:
        return []
    here = next((n for n in range(crash, len(lines)) if lines[n].startswith("Current thread")), None)
    if here is None:
        return []
    frames = list(takewhile(_FRAME.match, lines[here + 1 :]))
    own = _own_frames(frames)
    return [lines[crash], *frames[: own[-1] + 1 if own else None]]


def place_of_node(lines: Sequence[str]) -> list[str]:
    """Return where the user's code created the operation that failed in a graph, in the form of a traceback.

    TensorFlow reports that as a list of frames with the error's message; it may come for several operations.
    """
    begin = next((number for number, line in enumerate(lines) if line.startswith("Detected at node")), None)
    if begin is None:
        return []
    listed = list(takewhile(lambda line: line.startswith(("  File ", "    ")), lines[begin + 1 :]))
    own = _own_frames(listed)
    last = [  # a function is listed once for each `if` and loop that is around the line
        number
        for place, number in enumerate(own)
        if number == own[-1] or _function(listed[number]) != _function(listed[own[place + 1]])
    ]
    return [line for number in last for line in listed[number : number + 2]]


def _function(frame: str) -> tuple[str, str]:
    file, _, function = frame.partition(", line ")
    return file, function.partition(", in ")[2]


def _own_frames(lines: Sequence[str]) -> list[int]:
    """Return the indices of the lines that name a place in the user's code."""
    return [number for number, line in enumerate(lines) if (match := _FRAME.match(line)) and _is_own(match[1])]


def _is_own(path: str) -> bool:
    inside = any(path.startswith(f"{folder}/") for folder in _OTHERS)
    # `<frozen importlib>`; and site- or dist-packages of another prefix
    return not (inside or path.startswith("<") or "-packages/" in path)
