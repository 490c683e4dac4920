"""From the heartbeats of tasks follows which tasks have stalled."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distlaunch.base.heartbeat import BEAT_S, Heartbeat
from distlaunch.base.liveness import Liveness, read_liveness
from distlaunch.supervise.facts import Stalled
from distlaunch.supervise.heartbeats import Heartbeats

A, B, SERVER = "worker:0", "worker:1", "ps:0"


class Watch:
    """Observes tasks each second, as long as a function of the second continues."""

    def __init__(self, *, training: bool = True, heard: tuple[int, ...] = ()) -> None:
        self.heartbeats, self.training, self.heard = Heartbeats(10, {A, B}), training, heard

    def follow(self, liveness, until: int) -> list[Stalled]:
        for now in range(until):
            if found := self.heartbeats.check(now, liveness(now), training=self.training, has_event=now in self.heard):
                return found
        return []


def alive(now: int, turns: int) -> Liveness:
    return Liveness(beats=4 * now + 1, calls=turns, step=turns)


def test_who_goes_on_is_left_alone() -> None:
    assert not Watch().follow(lambda now: {A: alive(now, now // 8), B: alive(now, now // 8)}, 100)


def test_who_holds_the_others_up_is_named() -> None:
    """B is in a callback; A has looked once more, and waits for it."""
    found = Watch().follow(lambda now: {A: alive(now, min(now, 6)), B: alive(now, min(now, 5))}, 100)
    assert found == [Stalled(16, B, frozen=False)]


def test_nobody_is_named_if_all_wait() -> None:
    found = Watch().follow(lambda now: {A: alive(now, min(now, 5)), B: alive(now, min(now, 5))}, 100)
    assert found == [Stalled(15, "", frozen=False)]


def test_who_saves_while_all_wait_is_named() -> None:
    def liveness(now: int) -> dict[str, Liveness]:
        at = alive(now, min(now, 5))
        return {A: at._replace(saving=now >= 5), B: at}

    assert Watch().follow(liveness, 100) == [Stalled(15, A, frozen=False)]


def test_who_writes_beside_training_holds_nobody_up() -> None:
    """B is in a callback; A has looked once more, and a thread of it writes a checkpoint."""

    def liveness(now: int) -> dict[str, Liveness]:
        return {A: alive(now, min(now, 6))._replace(writing=True), B: alive(now, min(now, 5))}

    assert Watch().follow(liveness, 100) == [Stalled(16, B, frozen=False)]


def test_a_task_alone_is_named() -> None:
    assert Watch().follow(lambda now: {A: alive(now, min(now, 5))}, 100) == [Stalled(15, A, frozen=False)]


def test_a_frozen_one_is_the_culprit_when_the_others_stop() -> None:
    found = Watch().follow(lambda now: {A: alive(now, min(now, 5)), B: alive(min(now, 5), min(now, 5))}, 100)
    assert found == [Stalled(15, B, frozen=True)]


def test_a_server_that_is_frozen_is_found_while_the_others_go_on() -> None:
    found = Watch().follow(lambda now: {A: alive(now, now), SERVER: alive(min(now, 5), 0)}, 100)
    assert found == [Stalled(15, SERVER, frozen=True)]


def test_what_the_run_tells_is_progress() -> None:
    def liveness(now: int) -> dict[str, Liveness]:
        return {A: alive(now, 3)}

    assert not Watch(heard=(9, 18, 27)).follow(liveness, 30)
    assert Watch(heard=(9, 18)).follow(liveness, 30)


def test_before_the_first_step_only_frozen_ones_count() -> None:
    assert not Watch(training=False).follow(lambda now: {A: alive(now, 0)}, 100)
    assert Watch(training=False).follow(lambda now: {A: alive(min(now, 3), 0)}, 100)


def test_who_is_slow_is_told_with_its_share() -> None:
    """B makes each call a second of four late."""
    watch = Watch()
    assert not watch.follow(lambda now: {A: alive(now, now // 4 + 1), B: alive(now, (now + 3) // 4)}, 101)
    assert watch.heartbeats.waited_fractions() == {B: pytest.approx(0.25, abs=0.01)}


def test_a_new_process_begins_anew() -> None:
    assert not Watch().follow(lambda now: {A: alive(now % 8, now % 8)}, 100)


def test_a_task_tells_its_signs_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "task" / "heartbeat"
    assert read_liveness(path) == Liveness()
    heartbeat = Heartbeat(path)
    heartbeat.turn()
    heartbeat.at_step(7)
    deadline = time.monotonic() + 20 * BEAT_S
    while not read_liveness(path).beats and time.monotonic() < deadline:
        time.sleep(BEAT_S / 10)
    found = read_liveness(path)
    assert (found.calls, found.step, heartbeat.step) == (1, 7, 7)
    assert found.beats > 0
    with heartbeat.saving():
        assert read_liveness(path).saving
    assert not read_liveness(path).saving
    with heartbeat.writing(), heartbeat.saving():
        pass
    with heartbeat.writing():
        assert read_liveness(path).has_to_finish
        assert not read_liveness(path).saving
    assert not read_liveness(path).has_to_finish


@pytest.mark.parametrize("content", [b"", b"torn"])
def test_a_torn_file_is_no_sign(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "heartbeat").write_bytes(content)
    assert read_liveness(tmp_path / "heartbeat") == Liveness()


def test_who_has_beaten_lately() -> None:
    watch = Watch(training=False)
    watch.follow(lambda now: {A: alive(now, 1), B: alive(min(now, 3), 1)}, 7)
    assert [watch.heartbeats.is_beating(task, 6) for task in (A, B, SERVER)] == [True, False, False]
