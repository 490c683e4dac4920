"""Tests of what a host may send: files that tasks write, of bounded size, and messages of the right types."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlaunch import __version__
from distlaunch.agent.output import MAX_LINE_BYTES
from distlaunch.agent.remote import task_files
from distlaunch.agent.remote.file_transfer import Incoming, send_file, send_folder
from distlaunch.agent.remote.frames import PROTOCOL, Frame, FrameError, FrameReader
from distlaunch.agent.remote.host_facts import host_facts
from distlaunch.agent.remote.run_copy import RunCopy
from distlaunch.agent.remote.task_files import check, is_written_by_tasks
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.engines.remote.replies import check_facts, check_reply, parse_liveness
from distlaunch.engines.remote.tasks import RemoteTasks

WRITTEN = [
    *("events.jsonl", "attempts/0/events.jsonl", "attempts/12/worker-1/stdout.log", "attempts/0/worker-1/error.json"),
    *("attempts/0/worker-0/profile/a.pb", "attempts/0/compiled/x", "attempts/0/record.json", "log.csv",
      "attempts/0/round-result.json", "attempts/0/worker-0/memory"),
    "my folder/é.npz",
    *("checkpoints/step-00000004/meta.json", "tensorboard/train/events.out", "export/saved_model/saved_model.pb"),
]  # fmt: skip
NOT_WRITTEN = [
    *(
        "config.yaml",
        "./config.yaml",
        "config.yaml/x",
        "plan.json",
        "environment.json",
        "run.json",
        "job.sh",
        "report.html",
    ),
    *("launcher.log", "job.exit", ".lock", ".secrets", ".control", "a/.hidden", "attempts/0/config.yaml", "attempts/0"),
    *(
        "attempts/0/round-order.json",
        "attempts/0/plan.json",
        "attempts/x/worker-1/stdout.log",
        "attempts/0/.control",
        "attempts/0/worker/x",
        "m.py",
    ),
    *("a/b/m.PY", "x.so", "a.pth", "attempts/0/worker-1/m.py", "", "a" * 2000, "a/" * 40 + "b", "attempts"),
]


@pytest.mark.parametrize("name", WRITTEN)
def test_tasks_write(name: str) -> None:
    assert is_written_by_tasks(name)


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_tasks_do_not_write(name: str, tmp_path: Path) -> None:
    assert not is_written_by_tasks(name)
    # in whichever way
    frames = [
        Frame("write", {"path": name, "fresh": True}, b"x"),
        Frame("write", {"path": name}, b"x"),
        Frame("write", {"path": f".{name}.part.tmp", "fresh": True}, b"x"),
        Frame("move", {"path": ".log.csv.part.tmp", "to": name}),
        Frame("move", {"path": name, "to": "log.csv"}),
        Frame("remove", {"path": name}),
    ]
    for frame in frames:
        with pytest.raises(FrameError):
            check(frame, 0)


@pytest.mark.parametrize(
    "frame",
    [
        Frame("write", {"path": "events.jsonl", "fresh": True}, b""),
        Frame("remove", {"path": "events.jsonl"}),
        Frame("move", {"path": ".events.jsonl.part.tmp", "to": "events.jsonl"}),
        Frame("write", {"path": "attempts/0/worker-0/stdout.log", "fresh": True}, b""),
        Frame("write", {"path": "log.csv", "fresh": True}, b""),
        Frame("remove", {"path": "checkpoints"}),
        Frame("remove", {"path": "tensorboard"}),
        Frame("remove", {"path": "checkpoints/a/b"}),
        Frame("move", {"path": "checkpoints/step-00000001", "to": "checkpoints/step-00000002"}),
        Frame("move", {"path": "log.csv", "to": "log.csv"}),
        Frame("write", {"path": "attempts/3/worker-1/stdout.log"}, b"x"),
        Frame("write", {"path": "../x"}, b"x"),
        Frame("write", {"path": 3}, b"x"),
        Frame("write", {"path": "x", "to": "y"}, b"x"),
    ],
)
def test_tasks_do_not_do(frame: Frame) -> None:
    with pytest.raises(FrameError):
        check(frame, 3, {"worker-1"})


def test_what_an_agent_sends_is_taken(tmp_path: Path) -> None:
    for name in WRITTEN:
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "there" / "config.yaml").write_text("x")
    (tmp_path / "here").mkdir()
    incoming = Incoming(tmp_path / "here", task_files.most_bytes)
    copy, logs = RunCopy(tmp_path / "there"), ("events.jsonl", "stdout.log")
    for name in WRITTEN:
        if name.endswith(logs):
            path = tmp_path / "there" / name
            path.unlink()
            copy.follow(name, whole_lines=True)
            path.write_text("{}\n")
    lines = list[str]()
    for message in [*copy.appended(), *copy.new_checkpoints(), *copy.changed()]:
        for frame in FrameReader().feed(message):
            if frame.kind == "line":
                lines.append(frame.text("text"))
            else:
                check(frame, 0)
                incoming.take(frame)
    assert not incoming.problem
    came = {path.relative_to(tmp_path / "here").as_posix() for path in (tmp_path / "here").rglob("*") if path.is_file()}
    # logs are followed, and sent as they grow
    assert came == set(WRITTEN)
    assert lines == ["not sent because they are code, or files that only a launcher may write: config.yaml"]


def test_messages_about_files_are_taken(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/y").write_bytes(b"y" * 300_000)
    for messages in (send_folder(tmp_path / "x", "checkpoints/step-00000001"), send_file(tmp_path / "x/y", "a/b.csv")):
        for message in messages:
            for frame in FrameReader().feed(message):
                check(frame, 0)


def test_a_file_becomes_only_so_long(tmp_path: Path) -> None:
    incoming = Incoming(tmp_path, lambda name: 10)
    for _ in range(3):
        incoming.take(Frame("write", {"path": "events.jsonl"}, b"x" * 8))
    assert (tmp_path / "events.jsonl").stat().st_size == 8
    assert "events.jsonl cannot be written: longer than 10 bytes" in incoming.problem
    assert task_files.most_bytes("attempts/0/worker-1/stdout.log") == task_files.LOG_BYTES
    assert task_files.most_bytes("attempts/0/worker-1/error.json") < 1 << 25
    assert task_files.most_bytes("tensorboard/events.jsonl") > task_files.LOG_BYTES


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_link(tmp_path: Path, kind: str) -> None:
    import os

    target, name = tmp_path / "target", tmp_path / "run" / "events.jsonl"
    name.parent.mkdir()
    target.write_text("mine")
    name.symlink_to(target) if kind == "link" else os.mkfifo(name)
    incoming = Incoming(tmp_path / "run")
    incoming.take(Frame("write", {"path": "events.jsonl"}, b"x"))
    assert target.read_text() == "mine"
    assert "events.jsonl cannot be written" in incoming.problem


def _plan(run: RunDir, hosts: dict[str, str]) -> Any:
    tasks = [SimpleNamespace(task=Task.parse(name), host=host, files=run.task(2, name)) for name, host in hosts.items()]
    return SimpleNamespace(attempt=2, tasks=tasks, lead=tasks[0].task, events=run.events)


@pytest.fixture
def shown() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def tasks(tmp_path: Path, shown: list[tuple[str, str]]) -> RemoteTasks:
    run = RunDir(tmp_path)
    plan = _plan(run, {"worker:0": "a", "worker:1": "b"})
    watch: Any = SimpleNamespace(check=lambda progress: None)
    return RemoteTasks(plan, {}, Incoming(tmp_path), lambda *line: shown.append(line), {}, watch, lambda name: None)


def link(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_a_host_writes_for_its_own_tasks_only(tasks: RemoteTasks, tmp_path: Path) -> None:
    for host, name in (("a", "worker-0"), ("b", "worker-1")):
        tasks.take(link(host), Frame("write", {"path": f"attempts/2/{name}/stdout.log", "mode": 0o777}, b"x"))
    tasks.take(link("a"), Frame("write", {"path": "events.jsonl"}, b"{}\n"))
    # one that was there in an earlier attempt
    tasks.take(link("b"), Frame("write", {"path": "attempts/1/worker-0/stdout.log"}, b"x"))
    for host, name in (("b", "attempts/2/worker-0/stdout.log"), ("b", "events.jsonl"), ("b", "config.yaml")):
        with pytest.raises(FrameError):
            tasks.take(link(host), Frame("write", {"path": name}, b"x"))
    for name in ("record.json", "round-result.json"):  # the chief is on the other host
        for frame in (
            Frame("write", {"path": f"attempts/2/.{name}.part.tmp", "fresh": True}, b"x"),
            Frame("move", {"path": f"attempts/2/.{name}.part.tmp", "to": f"attempts/2/{name}"}),
        ):
            with pytest.raises(FrameError, match="another host"):
                tasks.take(link("b"), frame)
            tasks.take(link("a"), frame)
    assert (tmp_path / "attempts/2/worker-1/stdout.log").stat().st_mode & 0o111 == 0
    tasks.close()


def test_so_many_files(tasks: RemoteTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "MAX_FILES", 3)

    def send(number: int) -> None:
        part = f"tensorboard/.{number}.part.tmp"
        tasks.take(link("a"), Frame("write", {"path": part, "fresh": True}, b"x"))
        tasks.take(link("a"), Frame("move", {"path": part, "to": f"tensorboard/{number}"}))

    for number in range(3):
        send(number)
    with pytest.raises(FrameError, match="more than 3 files"):
        send(3)
    tasks.close()


def test_a_flood_of_lines_is_bounded(tasks: RemoteTasks, shown: list[tuple[str, str]]) -> None:
    for number in range(100_000):
        tasks.take(link("b"), Frame("line", {"task": f"worker:{number}", "text": "x" * 10_000}))
    # that of another is not lost in it
    tasks.take(link("a"), Frame("line", {"task": "worker:0", "text": "here"}))
    tasks.wait(0.0)
    tasks.close()
    assert 1000 < len(shown) < 10_000
    assert {name for name, _ in shown} == {"a", "b"}
    assert max(len(text) for _, text in shown) <= MAX_LINE_BYTES + 4
    assert shown[-1][1].endswith("lines of this host are not shown")
    assert ("a", "here") in shown


@pytest.mark.parametrize(
    ("request_kind", "fields"),
    [
        ("reserve", {}),
        ("reserve", {"ports": "x"}),
        ("reserve", {"ports": [-1]}),
        ("reserve", {"ports": [70000]}),
        ("reserve", {"ports": [1.5]}),
        ("probe", {"missed": [-1]}),
        ("probe", {"missed": {"a": 1}}),
        ("open", {"shared": 1, "kept": ""}),
        ("open", {"shared": False, "checkpoints": ["x"], "kept": ""}),
        ("open", {"shared": False, "checkpoints": [-5], "kept": ""}),
        ("open", {"shared": True, "kept": 7}),
        ("state", {"state": []}),
        ("state", {"state": {"free_bytes": {"/": "much"}}}),
        ("compare", {"wrong": [3], "count": 1}),
        ("compare", {"wrong": ["a"] * 200_000, "count": 1}),
        ("code", {"same": None}),
        ("enter", {"error": ["x"]}),
    ],
)
def test_answers_of_another_type(request_kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        check_reply(request_kind, Frame("reply", fields))


@pytest.mark.parametrize("name", [*host_facts({})])
def test_greetings_of_another_type(name: str) -> None:
    facts = {**host_facts({}), "protocol": PROTOCOL}
    facts["addresses"] = [list(pair) for pair in facts["addresses"]]
    check_facts(Frame("hello", facts))
    for value in (None, [["x"]], {"a": [1]}):
        if name == "distlaunch":
            # it is refused for its version
            check_facts(Frame("hello", {**facts, name: value}))
        else:
            with pytest.raises(FrameError):
                check_facts(Frame("hello", {**facts, name: value}))
    assert facts["distlaunch"] == __version__


@pytest.mark.parametrize("plain", [None, 3, [], [1, 2, 3, 4, 5], [1, 1, "x", False, False], [1] * 9, {}])
def test_signs_of_another_type(plain: Any) -> None:
    with pytest.raises(FrameError):
        parse_liveness(plain)
    assert parse_liveness([1, 2, None, False, True]).has_to_finish
