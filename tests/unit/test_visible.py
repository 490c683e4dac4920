"""Control characters of names and messages are shown, and not obeyed by the terminal."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from distlaunch.base.visible import visible
from distlaunch.ui.console import JobConsole

HOSTILE = "a\x1b]0;title\x07b\x9b31mc\u202ed\x08\x7f\u2066"


def test_what_is_shown() -> None:
    assert visible(HOSTILE) == r"a\x1b]0;title\x07b\x9b31mc\u202ed\x08\x7f\u2066"
    assert visible("a\ud800b") == r"a\ud800b"
    assert visible("größe ✓ 漢字\tone\ntwo") == "größe ✓ 漢字\tone\ntwo"


@pytest.mark.parametrize("colours", [False, True])
def test_nothing_hostile_is_printed(colours: bool) -> None:
    out = io.StringIO()
    console = JobConsole(file=out, force_terminal=colours, color_system="standard" if colours else None)
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    for shown in (HOSTILE, Text(HOSTILE, style="bold"), table, Text.from_ansi("\x1b[31mred\x1b[0m plain")):
        console.print(shown, markup=False, highlight=False)
    found = out.getvalue()
    assert not {"\x07", "\x9b", "\u202e", "\x08", "\x7f", "\u2066"} & set(found)
    assert "\x1b]" not in found
    assert ("\x1b[31m" in found) == colours
    assert r"\x1b]0;title" in found
