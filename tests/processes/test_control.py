"""The control channel of a run, with a real controller behind it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import wait_until

from distlaunch.base.control import Connection, address_of
from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.stop import ask_for_stacks
from distlaunch.supervise.requests import ControlChannel, SignalPipe


def answer(path: Path, said: bytes) -> dict[str, str]:
    """Send a line to a control channel and return its answer."""
    with socket.socket(socket.AF_UNIX) as connection, address_of(path) as address:
        connection.settimeout(10)
        connection.connect(address)
        connection.sendall(said)
        return dict(json.loads(connection.recv(4096)))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[SignalPipe]:
    with SignalPipe(tmp_path / "control") as signals:
        yield signals


def test_requests_arrive_as_signals(tmp_path: Path, pipe: SignalPipe) -> None:
    heard: list[signal.Signals] = []
    for request, expected in [
        ("stop", [signal.SIGTERM]),
        ("stacks", [signal.SIGUSR2]),
        ("stop-now", [signal.SIGINT, signal.SIGINT]),
    ]:
        heard.clear()
        with Connection(tmp_path / "control") as connection:
            assert connection.ask(request, 10) == ""  # type: ignore[arg-type]
            wait_until(lambda: heard.extend(pipe.read()) or len(heard) >= 1)
        assert heard == expected


def test_a_launcher_in_another_container_of_this_machine(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.lock(), SignalPipe(run.control) as signals:
        (run.path / ".lock").write_text("1 other-container")
        assert ask_for_stacks(run)
        assert signals.read() == [signal.SIGUSR2]


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        (b"hello\n", "expected a line of JSON with 'version' and 'request'"),
        (b"[1]\n", "expected a line of JSON with 'version' and 'request'"),
        (b'{"version": 2, "request": "stop"}\n', "uses version 1 of the protocol, not 2"),
        (b'{"version": 1, "request": "restart"}\n', "got 'restart'; expected one of stop, stop-now, stacks"),
        (b"x" * 5000, "expected a line of JSON with 'version' and 'request'"),
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, pipe: SignalPipe, said: bytes, refused: str) -> None:
    assert refused in answer(tmp_path / "control", said)["refused"]
    assert pipe.read() == []


def test_only_the_owner_may_connect(tmp_path: Path, pipe: SignalPipe) -> None:
    assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o600


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "control"
    path.write_text("of a controller that was killed")
    with SignalPipe(path):
        assert path.is_socket()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Connection(path)


def test_a_directory_of_any_depth(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    with SignalPipe(folder / "control") as signals, Connection(folder / "control") as connection:
        assert connection.ask("stop", 10) == ""
        assert signals.read() == [signal.SIGTERM]


def test_where_no_socket_can_be_made_the_run_goes_on(tmp_path: Path) -> None:
    channel = ControlChannel(tmp_path / "nowhere" / "control", lambda number: None)
    channel.close()


def test_a_connection_that_cannot_be_accepted_does_not_end_the_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = socket.socket.accept
    errors = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    def accept_later(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with SignalPipe(tmp_path / "control") as signals, Connection(tmp_path / "control") as connection:
        assert connection.ask("stop", 10) == ""
        assert signals.read() == [signal.SIGTERM]


def test_connections_are_closed_when_their_clients_are_gone(tmp_path: Path, pipe: SignalPipe) -> None:
    waiting = Connection(tmp_path / "control")
    with waiting:
        assert waiting.ask("stop", 10) == ""
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            with Connection(tmp_path / "control") as connection:
                assert connection.ask("stacks", 10) == ""
        # the last one is closed when the next one comes; what else opens files in this process closes them again
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)
        assert not waiting.wait(0.001), "who waits for the controller's end still does"
