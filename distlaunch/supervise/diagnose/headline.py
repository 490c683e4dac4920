"""The most informative line of an error message."""

from __future__ import annotations

import re
from itertools import takewhile
from textwrap import dedent

COLOURS = re.compile(r"\x1b\[[\d;]*m")


_LISTING = "Arguments received by"
"""Keras lists what a layer or a function was called with, after the reason."""


def headline(message: str) -> str:
    """The line that says most: not the listing that graph errors begin with, nor the frames of AutoGraph."""
    lines = [COLOURS.sub("", line) for line in without_listing(message.splitlines())]
    lines = [line for line in takewhile(lambda line: not line.lstrip().startswith(_LISTING), lines) if line.strip()]
    # AutoGraph's message: `in user code:`, the frames, and below them the error
    if message.lstrip().startswith(_USER_CODE) and (cause := message.strip().split("\n\n", 2)[2:]):
        return headline(dedent(cause[0]))  # below the frames
    # of several operations that failed at once each has a line of its own
    heads = [line for line in lines if not line.startswith(GRAPH_ERROR) and not _SEVERAL.match(line)]
    line = _ROOT.sub("", heads[0]) if heads else lines[0] if lines else ""
    if line.endswith(_OPENING) and lines[-1].lstrip().startswith(_CLOSING):
        line = f"{line} ... {lines[-1].strip()}"  # a value printed over many lines
    if line.startswith("Exception encountered when calling") and len(lines) > lines.index(line) + 1:
        line = f"{line} {lines[lines.index(line) + 1].strip()}"  # Keras gives the reason below
    return cut(line)


GRAPH_ERROR = "Graph execution error:"


_USER_CODE = "in user code:"


_SEVERAL = re.compile(r"\d+ root error\(s\) found\.")


# such as `  (0) INVALID_ARGUMENT:  {{function_node __wrapped__X}} text`
_ROOT = re.compile(r"^(?:\s*\(\d+\) [A-Z_]+: +)?(?:\{\{function_node \S+\}\} +)?")


_OPENING, _CLOSING = ("{", "[", "("), ("}", "]", ")")


def cut(line: str) -> str:
    # an array in a message may have thousands of characters
    return line if len(line) <= 400 else line[:400] + " ..."


def without_listing(lines: list[str]) -> list[str]:
    """Without `Detected at node ...` and the frames below it, and without node names."""
    kept: list[str] = []
    listing = False
    for line in lines:
        in_list = not line.strip() or line.startswith(("  File ", "    "))
        listing = line.startswith("Detected at node") or (listing and in_list)
        if not listing and not line.lstrip().startswith("[[{{node"):
            kept.append(line)
    return kept
