"""Bytes to lines."""

from __future__ import annotations

import pytest

from distlaunch.launch.screen import HOLD_S, Screen
from distlaunch.launch.streams import Allowance, LineSplitter

CASES = {
    "lines": ([b"a\nb\n"], ["a", "b"]),
    "in pieces": ([b"a", b"b\nc", b"\n"], ["ab", "c"]),
    "no line break at the end": ([b"a\nb"], ["a", "b"]),
    "windows": ([b"a\r\nb\r", b"\n"], ["a", "b"]),
    "progress bar": ([b"10%\r", b"20%\r", b"30%\ndone\n"], ["30%", "done"]),
    "progress bar without end": ([b"10%\r20%"], ["20%"]),
    "progress bar that ends with a return": ([b"10%\r20%\r"], ["20%"]),
    "utf-8 cut in two": ([b"\xc3", b"\xa9\n"], ["\u00e9"]),
    "not utf-8": ([b"\xff\n"], ["\ufffd"]),
    "long": ([b"x" * 25 + b"\nb\n"], ["x" * 10 + " ...", "b"]),
    "long, in pieces": ([b"x" * 8, b"x" * 8, b"x" * 8, b"\nb\n"], ["x" * 10 + " ...", "b"]),
    "long bar": ([b"12345678\r", b"abcdefgh\r", b"ABCDEFGH", b"\n"], ["ABCDEFGH"]),
    "empty": ([b"", b"\n"], [""]),
}


@pytest.mark.parametrize("case", CASES)
def test_lines(case: str) -> None:
    pieces, expected = CASES[case]
    splitter = LineSplitter(max_bytes=10)
    assert [line for piece in pieces for line in splitter.feed(piece)] + splitter.flush() == expected


def test_skipping_keeps_the_line_that_is_open() -> None:
    splitter = LineSplitter()
    assert splitter.skip(b"a\nb\nhal") == 2
    assert splitter.feed(b"f\n") == ["half"]


def test_allowance_refills() -> None:
    allowance = Allowance(0.0, per_s=10, at_once=2)
    assert [allowance.take(now) for now in (0, 0, 0, 0.05, 0.15, 0.15)] == [True, True, False, False, True, False]


class TestScreen:
    def setup_method(self) -> None:
        self.shown: list[str] = []
        self.now = 0.0
        self.screen = Screen(lambda task, text: self.shown.append(text), lambda: self.now)

    def test_a_traceback_that_the_program_survives_is_shown_later(self) -> None:
        for text in ("before", "Traceback (most recent call last):", "  File x", "KeyError: 1"):
            self.screen.line("worker:0", text)
        self.screen.line("worker:1", "other")
        assert self.shown == ["before", "other"]
        self.now = HOLD_S
        self.screen.tick()
        assert self.shown[2:] == ["Traceback (most recent call last):", "  File x", "KeyError: 1"]

    def test_a_traceback_that_the_report_tells_is_not(self) -> None:
        self.screen.line("worker:0", "Traceback (most recent call last):")
        self.screen.fail()
        self.screen.line("worker:1", "Collective ops is aborted")
        self.screen.close()
        assert self.shown == []
