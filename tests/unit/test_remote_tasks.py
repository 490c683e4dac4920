"""The end of tasks on other hosts: what they wrote is waited for, unless the user does not want to wait."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlaunch.agent.remote.file_transfer import Incoming
from distlaunch.agent.remote.frames import Frame
from distlaunch.engines.remote.link import LinkError
from distlaunch.engines.remote.tasks import RemoteTasks


class _Link:
    def __init__(self, name: str, answer: Frame | Exception | None) -> None:
        self.name, self.keeps_copies, self.asked, self._answer = name, False, list[str](), answer

    def request(self, kind: str) -> Future[Frame]:
        self.asked.append(kind)
        answer: Future[Frame] = Future()
        if isinstance(self._answer, Exception):
            answer.set_exception(self._answer)
        elif self._answer is not None:
            answer.set_result(self._answer)
        return answer


@pytest.fixture
def shown() -> list[str]:
    return []


def _tasks(tmp_path: Path, shown: list[str], *links: _Link) -> RemoteTasks:
    given: Any = {link.name: link for link in links}
    watch: Any = SimpleNamespace(check=lambda progress: None)
    plan: Any = SimpleNamespace(run_dir=Path("/runs/exp"))
    return RemoteTasks(
        plan, given, Incoming(tmp_path), lambda task, line: shown.append(line), {}, watch, lambda name: None
    )


def test_files_of_all_hosts_are_waited_for_once(tmp_path: Path, shown: list[str]) -> None:
    links = [_Link("a", Frame("reply", {"unsent": ""})), _Link("b", LinkError("it is gone"))]
    tasks = _tasks(tmp_path, shown, *links)
    for _ in range(2):
        tasks.collect(lambda: pytest.fail("nothing is to be waited for"))
    tasks.close()
    assert [link.asked for link in links] == [["end"], ["end"]]
    assert not shown


def test_who_does_not_want_to_wait_leaves_the_files_there(tmp_path: Path, shown: list[str]) -> None:
    links = [_Link("a", Frame("reply", {"unsent": ""})), _Link("b", None), _Link("c", None)]
    tasks = _tasks(tmp_path, shown, *links)
    looks = iter([False] * 8)
    tasks.collect(lambda: next(looks, True))
    tasks.close()
    assert shown == [
        "waiting for the last files of b, c; press Ctrl-C to leave them there",
        "the last files of b, c were not copied; they stay in the run directory there",
    ]
    assert [link.keeps_copies for link in links] == [False, True, True]


def test_a_host_keeps_files_that_it_could_not_send(tmp_path: Path, shown: list[str]) -> None:
    links = [_Link("a", Frame("reply", {"unsent": ""})), _Link("b", Frame("reply", {"unsent": "latest (gone)"}))]
    tasks = _tasks(tmp_path, shown, *links)
    tasks.collect(lambda: False)
    tasks.close()
    assert shown == ["warning: b: could not be sent: latest (gone); they stay in /runs/exp there"]
    assert [link.keeps_copies for link in links] == [False, True]


def test_an_end_wakes_who_waits(tmp_path: Path, shown: list[str]) -> None:
    tasks = _tasks(tmp_path, shown)
    assert not tasks.wait(0.0)
    tasks.note_end()
    assert tasks.wait(600.0)
    assert not tasks.wait(0.0)
    tasks.close()
