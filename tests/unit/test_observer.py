"""Tests of how the launcher reports to a view that may be slow, stuck, gone or wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from distlaunch.base.events import Event, Notice
from distlaunch.supervise.observer import LINE_OVERHEAD, Observer, Silent, ThreadedObserver

DEADLINE_S = 10.0


class View(Silent):
    """Remembers what it was told. Shows nothing while `gate` is closed; `stuck` tells that it has come to the gate."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.gate, self.stuck = threading.Event(), threading.Event()
        self.gate.set()
        self.fail: Callable[[], None] = lambda: None

    def close(self, told: Observer) -> None:
        """Close the gate, and wait until the view waits at it."""
        self.gate.clear()
        told.note("gate")
        assert self.stuck.wait(DEADLINE_S)

    def event(self, event: Event) -> None:
        self._take(f"event {event.message}" if isinstance(event, Notice) else "event")

    def line(self, task: str, text: str) -> None:
        self._take(f"{task} {text}")

    def note(self, text: str) -> None:
        self._take(f"note {text}")

    def tick(self, now: float) -> None:
        self._take(f"tick {now:g}")

    def ended(self) -> None:
        self._take("ended")

    def _take(self, text: str) -> None:
        if not self.gate.is_set():
            self.stuck.set()
            assert self.gate.wait(DEADLINE_S)
        self.fail()
        self.told.append(text)


def notice(number: int) -> Notice:
    return Notice(level="info", message=str(number))


def num_threads() -> int:
    return sum(thread.name == "view" for thread in threading.enumerate())


def test_everything_is_shown_in_order_and_no_thread_stays() -> None:
    view = View()
    with ThreadedObserver(view) as told:
        for number in range(100):
            told.line("worker:0", str(number))
            told.event(notice(number))
        told.ended()
        told.note("restart")
    expected = [text for number in range(100) for text in (f"worker:0 {number}", f"event {number}")]
    assert view.told == [*expected, "ended", "note restart"]
    assert num_threads() == 0


def test_who_tells_nothing_needs_no_thread() -> None:
    with ThreadedObserver(View()):
        assert num_threads() == 0


def test_it_can_be_used_again() -> None:
    view = View()
    told = ThreadedObserver(view)
    for text in ("a", "b"):
        with told:
            told.note(text)
        assert view.told[-1] == f"note {text}"
        assert num_threads() == 0


def test_nobody_waits_for_a_view_that_is_stuck() -> None:
    """Each call returns though the view hangs. One tick is kept waiting, a number of lines, and all other calls."""
    view = View()
    with ThreadedObserver(view, max_characters=4 * LINE_OVERHEAD) as told:
        view.close(told)
        for number in range(10):
            told.tick(number)
            told.line("worker:0", str(number))
            told.event(notice(number))
        told.ended()
        assert view.told == []
        view.gate.set()
    events = [f"event {number}" for number in range(10)]
    lines = [f"worker:0 {number}" for number in range(4)]
    note = "note the output was not read in time: 6 lines are only in the logs"
    assert [text for text in view.told if text.startswith("tick")] == ["tick 0"]
    assert [text for text in view.told if text.startswith("event")] == events
    assert [text for text in view.told if text.startswith("worker")] == lines
    assert view.told[-2:] == [note, "ended"]


def test_dropped_lines_are_told_once_when_there_is_room_again() -> None:
    view, shown = View(), threading.Event()
    with ThreadedObserver(view, max_characters=4 * LINE_OVERHEAD) as told:
        view.close(told)
        for number in range(7):
            told.line("a", str(number))
        view.gate.set()
        view.fail = lambda: shown.set() if len(view.told) == 6 else None
        told.note("up to here")
        told.note("and this")  # when the view comes to it, it has shown what was before
        assert shown.wait(DEADLINE_S)
        told.line("a", "7")
        told.line("a", "8")
    note = "note the output was not read in time: 3 lines are only in the logs"
    before = ["note gate", "a 0", "a 1", "a 2", "a 3", "note up to here", "note and this"]
    assert view.told == [*before, note, "a 7", "a 8"]


def test_a_reader_that_has_gone_ends_the_showing_alone() -> None:
    view = View()

    def fail() -> None:
        raise BrokenPipeError

    told = ThreadedObserver(view)
    with told:
        told.note("a")
    view.fail = fail
    with told:
        told.note("b")
        for number in range(3):
            told.tick(number)
        told.ended()
    with told:
        told.note("c")
    assert view.told == ["note a"]


@pytest.mark.parametrize("call", ["tick", "ended", "exit"])
def test_a_bug_of_the_view_surfaces_once_where_it_harms_nothing(call: str) -> None:
    view, failed = View(), threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("bug")

    told = ThreadedObserver(view)

    def use() -> None:
        with told:
            view.fail = fail
            told.line("worker:0", "x")
            assert failed.wait(DEADLINE_S)
            told.line("worker:0", "y")
            told.note("z")
            # the view's thread may not have noted it yet
            while call == "tick":
                told.tick(0)
            if call == "ended":
                told.ended()

    with pytest.raises(RuntimeError, match="bug"):
        use()
    assert (view.told, num_threads()) == ([], 0)
    with told:
        told.tick(1)


def test_who_shows_by_the_same_view_shares_a_thread_and_its_order() -> None:
    """The end of an attempt waits for nothing; that of the job does."""
    view = View()
    with ThreadedObserver.of(view) as job:
        for attempt in range(2):
            with ThreadedObserver.of(job) as told:
                assert told is job
                if not attempt:
                    view.close(told)
                told.ended()
            assert num_threads() == 1
            job.note(f"after {attempt}")
        assert view.told == []
        view.gate.set()
    assert view.told == ["note gate", "ended", "note after 0", "ended", "note after 1"]
    assert num_threads() == 0
