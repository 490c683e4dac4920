"""Bytes to lines."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlaunch.agent.output import PAUSE_S, Allowance, LineSplitter, Pump
from distlaunch.base.secret_mask import SecretMask
from distlaunch.supervise.observer import HOLD_S, Screen

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
    assert splitter.skip(b"a\nb\nhal") == (2, ["a", "b"])
    assert splitter.feed(b"f\n") == ["half"]


def test_skipping_gives_the_last_lines_whole() -> None:
    splitter = LineSplitter()
    assert splitter.skip(b"hal") == (0, [])
    assert splitter.skip(b"f\nx") == (1, ["half"])
    number, last = splitter.skip(b"".join(b"%d\n" % each for each in range(50)))
    assert (number, last[-1], last[0]) == (50, "49", "40")


def test_allowance_refills() -> None:
    allowance = Allowance(0.0, per_s=10, at_once=2)
    assert [allowance.take(now) for now in (0, 0, 0, 0.05, 0.15, 0.15)] == [True, True, False, False, True, False]


class TestFlood:
    """More lines at once than the screen takes."""

    @pytest.fixture(autouse=True)
    def _flood(self, tmp_path: Path) -> Iterator[None]:
        self.shown: list[str] = []
        self.now = 0.0
        self.log = tmp_path / "stdout.log"
        self.pump = Pump(lambda task, text: self.shown.append(text), lambda: self.now)
        reading, self.writing = os.pipe()
        self.pump.add("worker:0", io.FileIO(reading), self.log, SecretMask({}))  # type: ignore[arg-type]
        yield
        self.pump.close()
        os.close(self.writing)

    def print(self, *lines: str) -> None:
        os.write(self.writing, "".join(f"{line}\n" for line in lines).encode())
        self.pump.turn(0.0)

    @pytest.mark.parametrize("in_pieces", [False, True])
    def test_its_last_lines_are_shown_when_it_ends(self, in_pieces: bool) -> None:
        numbers = [str(number) for number in range(1000)]
        if in_pieces:
            self.print(*numbers[:600])
            self.print(*numbers[600:], "", "ACCURACY 0.97")
        else:
            self.print(*numbers, "", "ACCURACY 0.97")
        assert self.shown == numbers[:400]
        self.pump.finish("worker:0")
        assert self.shown[400:] == [f"... 599 lines are only in {self.log}", "998", "999", "ACCURACY 0.97"]

    def test_and_when_it_pauses(self) -> None:
        self.print(*["x"] * 400, "a", "b")
        self.now = PAUSE_S / 2
        self.pump.turn(0.0)
        assert len(self.shown) == 400
        self.now = PAUSE_S
        self.pump.turn(0.0)
        assert self.shown[400:] == ["a", "b"], "nothing is left out"
        self.pump.turn(0.0)
        self.print("c")
        assert self.shown[402:] == ["c"]

    def test_what_goes_on_at_once_is_counted_alone(self) -> None:
        self.print(*["x"] * 450)
        self.now = PAUSE_S / 2
        self.print("y")
        assert self.shown[400:] == [f"... 50 lines are only in {self.log}", "y"]


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


def test_standard_output_is_read_before_standard_error(tmp_path: Path) -> None:
    """Output from before a traceback is shown, even if both are read in the same turn and the run then fails."""
    shown: list[str] = []
    screen = Screen(lambda task, text: shown.append(text), lambda: 0.0)
    pump = Pump(screen.line, lambda: 0.0)
    error, output = os.pipe(), os.pipe()  # the pipe with the smaller descriptor would be read first
    for reading, name in ((output[0], "stdout.log"), (error[0], "stderr.log")):
        pump.add("worker:0", io.FileIO(reading), tmp_path / name, SecretMask({}))  # type: ignore[arg-type]
    os.write(error[1], b"Traceback (most recent call last):\n  boom\n")
    os.write(output[1], b"hello\n")
    pump.turn(1.0)
    assert shown == ["hello"]
    pump.close()
    os.close(output[1])
    os.close(error[1])
