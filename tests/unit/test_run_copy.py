"""The copy of a run directory on a host: what is sent of it, and when it may be deleted."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from distlaunch.agent.remote import file_transfer
from distlaunch.agent.remote.file_transfer import MOVE, REMOVE, WRITE, Incoming, receive, send_folder
from distlaunch.agent.remote.frames import Frame, FrameReader
from distlaunch.agent.remote.run_copy import CopyFolder, CopyInUseError, RunCopy, is_shared
from distlaunch.base.errors import UsageError

_AGENT = """
import pathlib, sys
from distlaunch.agent.remote.run_copy import CopyFolder
from distlaunch.base.errors import UsageError

try:
    folder = CopyFolder(pathlib.Path(sys.argv[1]))
    print(folder.kept, flush=True)
except UsageError as error:
    print(error, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def copy(tmp_path: Path) -> RunCopy:
    (tmp_path / "copy").mkdir()
    return RunCopy(tmp_path / "copy")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Return a function that opens a copy in a new process, which keeps it open.

    The function returns the path of an earlier copy that was moved aside, or the error.
    """
    agents = list[subprocess.Popen[str]]()

    def opens(root: Path) -> str:
        words = [sys.executable, "-c", _AGENT, str(root)]
        agents.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stdout = agents[-1].stdout
        assert stdout is not None
        return stdout.readline().strip()

    yield opens
    for each in agents:
        each.communicate()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def take(messages: Iterable[bytes], target: Path) -> list[str]:
    """Receives messages; returns what was moved into place or removed."""
    done = []
    for message in messages:
        for frame in FrameReader().feed(message):
            receive(target, frame)
            if frame.kind == MOVE:
                done.append(frame.text("to"))
            elif frame.kind == REMOVE and ".tmp" not in frame.text("path"):
                done.append(f"-{frame.text('path')}")
    return done


def checkpoint(copy: RunCopy, name: str, text: str = "state") -> Path:
    folder = copy.root / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "state").write_text(text)
    return folder


def leave_copy(root: Path, *names: str) -> None:
    """Leave a copy as an agent does that has lost its connection."""
    folder = CopyFolder(root)
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from the task")
    folder.close()


def test_a_copy_in_which_tasks_have_run_is_moved_aside(tmp_path: Path) -> None:
    root = tmp_path / "run"
    (tmp_path / "run.kept-1").mkdir()
    leave_copy(root, "attempts/0/worker-0/stdout.log", "checkpoints/step-00000002/state")
    folder = CopyFolder(root)
    assert folder.kept == tmp_path / "run.kept-2"
    assert (folder.kept / "checkpoints" / "step-00000002" / "state").read_text() == "from the task"
    assert [path.name for path in root.iterdir()] == [".copy-of-a-run"]
    folder.remove()
    assert folder.kept.is_dir()


def test_a_copy_without_files_of_tasks_is_emptied(tmp_path: Path) -> None:
    root = tmp_path / "run"
    leave_copy(root, "attempts/0/config.yaml", "checkpoints/step-00000002/state", "events.jsonl")
    assert CopyFolder(root).kept is None
    assert [path.name for path in root.iterdir()] == [".copy-of-a-run"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_copy_in_use_is_left_alone(tmp_path: Path, agent: Callable[[Path], str]) -> None:
    root = tmp_path / "run"
    assert agent(root) == "None"
    (root / "attempts" / "0" / "worker-0").mkdir(parents=True)
    assert "another agent (process " in agent(root)
    with pytest.raises(CopyInUseError, match=f"uses {root}; wait until its job has ended, or choose another --name"):
        CopyFolder(root)
    assert (root / "attempts" / "0" / "worker-0").is_dir()


def test_a_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").touch()
    with pytest.raises(UsageError, match="belongs to another run"):
        CopyFolder(other)
    assert (other / "config.yaml").exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match=f"cannot create {root}: .*; choose another runs_dir"):
            CopyFolder(root)


def test_logs_are_followed_and_events_in_whole_lines(copy: RunCopy, target: Path) -> None:
    (copy.root / "events.jsonl").write_text("before\n")
    copy.begin()
    copy.follow("events.jsonl", whole_lines=True)
    copy.follow("log")
    assert not list(copy.appended())
    with (copy.root / "events.jsonl").open("a") as events, (copy.root / "log").open("a") as log:
        events.write("one\nha")
        log.write("no line")
        events.flush()
        log.flush()
        take(copy.appended(), target)
        assert (target / "events.jsonl").read_text() == "one\n"
        assert (target / "log").read_text() == "no line"
        # the controller adds something of its own
        with (target / "events.jsonl").open("a") as own:
            own.write("own\n")
        events.write("lf\n")
    take(copy.appended(), target)
    assert (target / "events.jsonl").read_text() == "one\nown\nhalf\n"


def test_replaced_files_are_sent_in_the_order_of_writing(copy: RunCopy, target: Path) -> None:
    copy.begin()
    assert not take(copy.replaced(["record", "result"]), target)
    (copy.root / "record").write_text("1")
    assert take(copy.replaced(["record", "result"]), target) == ["record"]
    for name in ("record", "result"):
        (copy.root / f".{name}").write_text("2")
        (copy.root / f".{name}").replace(copy.root / name)
    assert take(copy.replaced(["record", "result"]), target) == ["record", "result"]
    assert not take([*copy.replaced(["record", "result"]), *copy.changed()], target), "each version is sent once"


def test_a_file_of_the_launcher_is_not_sent_back(copy: RunCopy, target: Path) -> None:
    copy.begin()
    (copy.root / "order").write_text("1")
    copy.note_received("order")
    assert not take(copy.changed(), target)


def test_each_checkpoint_is_sent_once_and_the_last_is_never_removed(copy: RunCopy, target: Path) -> None:
    checkpoint(copy, "step-00000001")
    copy.begin()  # the controller has sent it
    assert not copy.has_new_checkpoints
    second, draft = checkpoint(copy, "step-00000002"), checkpoint(copy, ".step-00000003.tmp")
    assert take(copy.new_checkpoints(), target) == ["checkpoints/step-00000002"]
    assert not copy.has_new_checkpoints
    draft.rename(copy.root / "checkpoints" / "step-00000003")
    (second / "state").unlink()
    second.rmdir()
    assert take(copy.new_checkpoints(), target) == ["checkpoints/step-00000003", "-checkpoints/step-00000002"]
    for step in (1, 3):
        folder = copy.root / "checkpoints" / f"step-0000000{step}"
        (folder / "state").unlink()
        folder.rmdir()
    # all gone: they stay where the controller has them
    assert take(copy.new_checkpoints(), target) == []
    assert (target / "checkpoints" / "step-00000003" / "state").read_text() == "state"


def test_everything_else_is_sent_when_it_has_changed(copy: RunCopy, target: Path) -> None:
    (copy.root / "config.yaml").write_text("sent by the controller")
    copy.begin()
    copy.follow("attempts/0/worker-0/stdout.log")
    (copy.root / "export").mkdir()
    (copy.root / "export" / "model.keras").write_text("model")
    task = copy.root / "attempts" / "0" / "worker-0"
    task.mkdir(parents=True)
    for name in ("stdout.log", "heartbeat", ".hidden", "error-1.json"):
        (task / name).write_text("x")
    assert sorted(take(copy.changed(), target)) == ["attempts/0/worker-0/error-1.json", "export/model.keras"]
    assert take(copy.changed(), target) == []


def test_files_that_cannot_be_read_are_named_and_all_others_are_sent(copy: RunCopy, target: Path) -> None:
    copy.begin()
    for name in ("a", "z"):
        (copy.root / name).write_text("x")
    (copy.root / "latest").symlink_to("/nowhere/gone")
    os.mkfifo(copy.root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(copy.root / "socket"))
        assert sorted(take(copy.changed(), target)) == ["a", "z"]
    assert copy.unsent == (
        "latest (No such file or directory), pipe (is not a regular file), socket (No such device or address)"
    )
    (copy.root / "socket").unlink()
    assert copy.unsent == "latest (No such file or directory), pipe (is not a regular file)"


def test_a_checkpoint_that_cannot_be_read_is_named_until_it_can(copy: RunCopy, target: Path) -> None:
    copy.begin()
    checkpoint(copy, "step-00000001")
    os.mkfifo(copy.root / "checkpoints" / "step-00000002")
    assert take(copy.new_checkpoints(), target) == ["checkpoints/step-00000001"]
    assert copy.unsent == "checkpoints/step-00000002 (is not a regular file)"
    assert copy.has_new_checkpoints, "sending is tried again"
    (copy.root / "checkpoints" / "step-00000002").unlink()
    checkpoint(copy, "step-00000002")
    assert take(copy.new_checkpoints(), target) == ["checkpoints/step-00000002"]
    assert not copy.unsent


def test_a_file_that_a_callback_writes_beside_checkpoints_is_sent(copy: RunCopy, target: Path) -> None:
    copy.begin()
    (copy.root / "checkpoints").mkdir()
    (copy.root / "checkpoints" / "best.keras").write_text("model")
    assert take(copy.new_checkpoints(), target) == ["checkpoints/best.keras"]
    assert (target / "checkpoints" / "best.keras").read_text() == "model"


def test_a_disk_is_shared_if_a_fresh_name_is_seen(tmp_path: Path) -> None:
    assert not is_shared(tmp_path, ".seen-1")
    (tmp_path / ".seen-1").touch()
    assert is_shared(tmp_path, ".seen-1")


def test_half_of_a_checkpoint_is_never_put_in_place(
    copy: RunCopy, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the controller is full for one of its parts."""
    folder = checkpoint(copy, "step-00000001", "x" * 300_000)
    incoming, received = Incoming(target), list[str]()

    def full_once(root: Path, frame: Frame, limit: int | None) -> None:
        received.append(frame.kind)
        if received == ["remove", "write"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        receive(root, frame, limit)

    monkeypatch.setattr(file_transfer, "receive", full_once)
    for name in ("step-00000001", "step-00000002"):
        for message in send_folder(folder, f"checkpoints/{name}"):
            for frame in FrameReader().feed(message):
                incoming.take(frame)
    assert "No space left" in incoming.problem
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_file_that_does_not_fit_is_never_put_in_place(target: Path) -> None:
    """The system writes the part that fits and reports its length; only the next write fails."""
    incoming = Incoming(target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for path, payload in (("long", b"x" * 1001), ("short", b"x" * 1000)):
            incoming.take(Frame(WRITE, {"path": f".{path}.part.tmp", "fresh": True}, payload))
            incoming.take(Frame(MOVE, {"path": f".{path}.part.tmp", "to": path}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert incoming.problem == ".long.part.tmp cannot be written: File too large"
    assert (target / "short").read_bytes() == b"x" * 1000
    assert not (target / "long").exists()


def test_only_a_copy_is_deleted(tmp_path: Path) -> None:
    folder = CopyFolder(tmp_path / "copy")
    folder.remove()
    assert not folder.root.exists()
    folder.root.mkdir()
    folder.remove()
    assert folder.root.exists()


def test_folders_made_for_a_copy_go_with_it_unless_somebody_else_uses_them(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    first = CopyFolder(tmp_path / "work" / "deep" / "runs" / "first")
    second = CopyFolder(tmp_path / "work" / "deep" / "runs" / "second")
    first.remove()
    assert second.root.is_dir()
    second.remove()
    first.remove()  # its own folders, of which it has been told nothing
    assert list(tmp_path.iterdir()) == [tmp_path / "work"]
    assert not (tmp_path / "work" / "deep").exists()
