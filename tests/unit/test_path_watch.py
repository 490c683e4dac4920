"""When two hosts count as cut off from each other."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from distlaunch.agent.remote.frames import Frame
from distlaunch.engines.remote.link import Link
from distlaunch.engines.remote.path_watch import PathWatch

HOSTS = {"10.0.0.1:1": "a", "10.0.0.2:2": "b", "10.0.0.3:3": "c"}


class Host:
    """A host that answers with the hosts that it cannot reach."""

    def __init__(self) -> None:
        self.missed: list[int] = []
        self.num_asked = 0

    def request(self, kind: str, **fields: Any) -> Future[Frame]:
        assert kind == "probe"
        assert [target[1] for target in fields["targets"]] == [1, 2, 3]
        self.num_asked += 1
        answer: Future[Frame] = Future()
        answer.set_result(Frame("reply", {"missed": list(self.missed)}))
        return answer


class Scene:
    """Three hosts and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hosts = {name: Host() for name in "abc"}
        self.watch = PathWatch(cast(dict[str, Link], self.hosts), HOSTS, 10.0, lambda: self.now)

    def look(self, progress: Any, times: int = 2) -> tuple[str, str] | None:
        found = None
        for _ in range(times):  # a round is asked for, then read
            found = found or self.watch.check(progress)
        return found


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    assert made.look(1) is None
    return made


def test_nobody_is_asked_before_the_first_step_and_one_round_is_made_then() -> None:
    scene = Scene()
    assert scene.look(None) is None
    assert scene.hosts["a"].num_asked == 0
    for step in range(5):
        scene.now += 9
        assert scene.look(step) is None
    assert scene.hosts["a"].num_asked == 1


def test_a_path_that_fails_twice_while_nothing_moves_is_a_cut(scene: Scene) -> None:
    scene.hosts["b"].missed, scene.hosts["c"].missed = [2], [1]
    scene.now = 11
    assert scene.look(1) is None
    found = scene.look(1)
    assert found is not None
    assert found[0] == "c"
    assert found[1] == "b can no longer reach c at 10.0.0.3:3, and no task makes a step"


def test_the_host_that_all_others_miss_is_given_up(scene: Scene) -> None:
    for name, missed in {"a": [0, 2], "b": [0], "c": [0]}.items():
        scene.hosts[name].missed = missed
    scene.now = 11
    assert (scene.look(1) or scene.look(1) or ("",))[0] == "a"


def test_a_step_between_two_rounds_begins_anew(scene: Scene) -> None:
    scene.hosts["b"].missed = [2]
    scene.now = 11
    assert scene.look(1) is None
    assert scene.look(2) is None
    scene.now = 22
    assert scene.look(2) is None
    assert scene.look(2) is not None


def test_a_port_that_nobody_listened_on_at_first_is_not_missed() -> None:
    scene = Scene()
    scene.hosts["a"].missed = [1, 2]
    assert scene.look(1) is None
    scene.now = 11
    assert scene.look(1, times=10) is None
