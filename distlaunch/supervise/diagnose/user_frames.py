"""Shortens a traceback to the part that helps the user: the frames in the user's code and the end."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+)')
_BEGIN = "Traceback (most recent call last)"
_CRASH = "Fatal Python error"
_LIBRARY_FOLDERS = (
    str(Path(__file__).parents[2]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)


def shortened(lines: Sequence[str], limit: int) -> list[str]:
    """Return the lines of the last exception, beginning with the first frame in the user's code.

    If no frame is in the user's code, the result begins with the first line of all exceptions.

    Args:
        limit: maximum number of lines. The last lines and the last frame in the user's code are kept.
    """
    # chained exceptions have several tracebacks; the last one ended the task
    begin = max((number for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=-1) + 1
    own = [begin + number for number in _user_frame_indices(lines[begin:])]
    kept = list(lines[own[0] if own else 0 :])
    if len(kept) <= limit:
        return kept
    if not own or own[-1] >= len(lines) - limit:
        return kept[-limit:]
    place = lines[own[-1] : own[-1] + 2]
    return [*place, "    ...", *lines[-(limit - len(place) - 1) :]]


def user_frame(lines: Sequence[str]) -> tuple[str, int] | None:
    """Return file and line of the innermost frame in the user's code; None if no frame is in the user's code.

    Works for tracebacks and crashes. If there are several exceptions, the frame is from the last that has one.
    """
    own = _user_frame_indices(lines)
    if not own:
        return None
    is_crash = any(line.startswith(_CRASH) for line in lines)  # a crash lists the innermost frame first
    match = _FRAME.match(lines[own[0 if is_crash else -1]])
    assert match is not None
    return match[1], int(match[2])


def short_user_frame(lines: Sequence[str]) -> str:
    """Return the innermost frame in the user's code as `bug.py:15`, without the folder, or an empty string.

    If there are several exceptions, only the last one is searched.
    """
    begin = max((number for number, line in enumerate(lines) if line.startswith(_BEGIN)), default=-1) + 1
    place = user_frame(lines[begin:])
    return f"{Path(place[0]).name}:{place[1]}" if place is not None else ""


def user_folders(lines: Sequence[str]) -> set[Path]:
    """Return the folders of the user's files in a traceback."""
    return {Path(match[1]).parent for number in _user_frame_indices(lines) if (match := _FRAME.match(lines[number]))}


def crash_frames(lines: Sequence[str]) -> list[str]:
    """Return the line that names a crash and faulthandler's frames, innermost first; empty if there was no crash.

    Callers of the user's code are left out.
    """
    crash = max((number for number, line in enumerate(lines) if line.startswith(_CRASH)), default=None)
    if crash is None:
        return []
    here = next((n for n in range(crash, len(lines)) if lines[n].startswith("Current thread")), None)
    if here is None:
        return []
    frames = list(takewhile(_FRAME.match, lines[here + 1 :]))
    own = _user_frame_indices(frames)
    return [lines[crash], *frames[: own[-1] + 1 if own else None]]


def node_definition(lines: Sequence[str]) -> list[str]:
    """Return the frames in which the user's code created an operation that failed in a graph.

    TensorFlow lists these frames in the error's message, possibly for several operations; only the frames of the first
    operation are returned.
    """
    begin = next((number for number, line in enumerate(lines) if line.startswith("Detected at node")), None)
    if begin is None:
        return []
    listed = list(takewhile(lambda line: line.startswith(("  File ", "    ")), lines[begin + 1 :]))
    own = _user_frame_indices(listed)
    last = [  # TensorFlow repeats a function for each `if` and loop around the line
        number
        for place, number in enumerate(own)
        if number == own[-1] or _function(listed[number]) != _function(listed[own[place + 1]])
    ]
    return [line for number in last for line in listed[number : number + 2]]


def _function(frame: str) -> tuple[str, str]:
    file, _, function = frame.partition(", line ")
    return file, function.partition(", in ")[2]


def _user_frame_indices(lines: Sequence[str]) -> list[int]:
    """Return the indices of the lines that name a place in the user's code."""
    return [number for number, line in enumerate(lines) if (match := _FRAME.match(line)) and _is_user_code(match[1])]


def _is_user_code(path: str) -> bool:
    inside = any(path.startswith(f"{folder}/") for folder in _LIBRARY_FOLDERS)
    # also skip `<frozen importlib>`, and site-packages or dist-packages of another prefix
    return not (inside or path.startswith("<") or "-packages/" in path)
