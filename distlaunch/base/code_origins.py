"""Replaces generated code in tracebacks by the user's lines from which it was generated."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

PREFIX = "__autograph_generated_file"
"""Prefix of the names of files of generated code."""
_PACKAGES = {"site-packages", "dist-packages", "distlaunch"}


class Origin(NamedTuple):
    """The origin of a line of generated code."""

    file: str
    line: int
    function: str
    text: str


origins: dict[tuple[str, int], Origin] = {}
"""Origins of lines in generated files that come from the user's code. `patches.tensorflow_autograph` fills it."""


def format_exception(error: BaseException) -> str:
    """Format an exception like `traceback.format_exception`, with the user's lines in place of generated ones."""
    trace = traceback.TracebackException.from_exception(error)
    _translate(trace)
    return translated("".join(trace.format()))


def translated(text: str) -> str:
    """Replace generated lines in a text by the user's lines, also where TensorFlow lists the lines that created a node.

    That list names lines without their source text, so the text is added.
    """

    def place(match: re.Match[str]) -> str:
        origin = origins.get((match["file"], int(match["line"])))
        return f'File "{origin.file}", line {origin.line}, in {origin.function}' if origin else match[0]

    def with_text(match: re.Match[str]) -> str:
        return f"{match[0][:-1]}    {linecache.getline(match['file'], int(match['line'])).strip()}\n"

    return _LISTED.sub(with_text, _PLACE.sub(place, text))


_PLACE = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in [^\n]+')  # as Python writes a frame
_LISTED = re.compile(_PLACE.pattern + r"\n\n")  # a frame with an empty line where its source text belongs
_OF_JAX = "JAX has removed its internal frames"
"""Part of a note that JAX adds to each error, and that says nothing about the error."""
_AUTOGRAPH = "/tensorflow/python/autograph/"
_FUNCTION = "tf__"
"""Prefix that AutoGraph gives to functions. Functions that it makes from an `if` or a loop have no prefix."""


def _translate(trace: traceback.TracebackException) -> None:
    if any(frame.filename.startswith(PREFIX) for frame in trace.stack):
        trace.stack = traceback.StackSummary.from_list(_without_generated(trace.stack))
    if isinstance(trace.__notes__, list):
        trace.__notes__ = [note for note in trace.__notes__ if _OF_JAX not in str(note)]
    # also translate the exceptions of a group
    for other in (trace.__cause__, trace.__context__, *(trace.exceptions or ())):
        if other is not None:
            _translate(other)


def _without_generated(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the user's frames in place of generated frames, and leave out frames of AutoGraph.

    A function of the user occurs once, although AutoGraph makes a function from each `if` and loop in it.
    """
    kept: list[traceback.FrameSummary] = []
    for frame in stack:
        if _AUTOGRAPH in frame.filename:
            continue
        if frame.filename.startswith(PREFIX):
            origin = origins.get((frame.filename, frame.lineno or 0))
            if origin is None:  # the line has no counterpart in the user's code
                continue
            # the body of an `if` or a loop replaces the frames of its function
            if not frame.name.startswith(_FUNCTION):
                del kept[_whole_of(origin, kept) :]
            frame = traceback.FrameSummary(
                origin.file, origin.line, origin.function, lookup_line=False, line=origin.text
            )
        kept.append(frame)
    return kept


def _whole_of(part: Origin, kept: Sequence[traceback.FrameSummary]) -> int:
    """Return the index of the frame whose function contains the `if` or loop `part`; `len(kept)` if there is none."""
    found = (n for n in reversed(range(len(kept))) if (kept[n].filename, kept[n].name) == (part.file, part.function))
    return next(found, len(kept))


def user_line(error: BaseException) -> str:
    """Return the last line of a traceback that is outside packages, as ` (mine.py:12)`, or an empty string."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _PACKAGES & set(Path(frame.filename).parts)]
    return f" ({_short(Path(own[-1].filename))}:{own[-1].lineno})" if own else ""


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
