"""A real agent at the other end of two pipes: what it refuses, and that it never stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from distlaunch import __version__
from distlaunch.agent.remote.frames import PROTOCOL, Frame, FrameReader, GreetingReader, encode
from distlaunch.agent.remote.run_copy import CopyFolder

MODULE = ("-m", "distlaunch.agent.remote")
COMMAND = ("-c", "from distlaunch.cli.main import main; main()", "agent")
SLEEPER = "import time; print('begun', flush=True); time.sleep(1000)"


class Agent:
    """The controller's side of one."""

    def __init__(self, words: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self._greeting: GreetingReader | None = GreetingReader()
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self._ended = False

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def next(self, *kinds: str, seconds: float = 30) -> Frame:
        """The next message of these kinds; others are passed over."""
        until = time.monotonic() + seconds
        while True:
            while self._frames:
                if (frame := self._frames.pop(0)).kind in kinds:
                    return frame
            assert not self._ended, f"it has ended without {kinds}"
            self._read(until)

    def answers(self, count: int) -> None:
        """Wait for this number of answers; none of them may be a refusal."""
        for _ in range(count):
            assert "error" not in self.next("reply").fields

    def _read(self, until: float) -> None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        assert select.select([fd], [], [], max(0, until - time.monotonic()))[0], "nothing came"
        data = os.read(fd, 65536)
        self._ended = not data
        if self._greeting is not None:
            rest = self._greeting.feed(data)
            if rest is None:
                return
            self._greeting, data = None, rest
        self._frames += self._reader.feed(data)

    def greet(self, folder: Path, **changes: Any) -> None:
        fields = {"id": 1, "protocol": PROTOCOL, "distlaunch": __version__, "lease_s": 30}
        # at once: an agent that refuses the first does not wait for the second
        self.send(encode("hello", **{**fields, **changes}) + encode("enter", id=9, folder=str(folder)))

    def begin(self, run: Path) -> Frame:
        """Opens a run directory and begins its first attempt."""
        self.send(encode("open", id=2, root=str(run), nonce="nothing"))
        answer = self.next("reply")
        self.send(encode("begin", attempt=0, without=[], beat_ms=500))
        return answer

    def start(self, code: str, task: str = "worker:0", attempt: int = 0, **env: str) -> None:
        argv = [sys.executable, "-c", code]
        self.send(encode("start", task=task, attempt=attempt, argv=argv, env=env, preload=None, cores=[]))

    def run_sleeper(self, folder: Path, **changes: Any) -> None:
        """Up to the start of a task that sleeps."""
        self.next("hello")
        self.greet(folder, **changes)
        self.answers(2)
        self.begin(folder / "run")
        self.start(SLEEPER)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    made = Agent(getattr(request, "param", MODULE))
    yield made
    left = psutil.Process(made.process.pid).children(recursive=True) if made.process.poll() is None else []
    made.end()
    assert not psutil.wait_procs(left, 10)[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_that_it_holds_is_reached_by_both_families(agent: Agent, tmp_path: Path, address: str) -> None:
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip("no IPv6 here")
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    agent.send(encode("reserve", id=3, ports=2))
    open_port, closed_port = agent.next("reply").fields["ports"]
    agent.send(encode("reserve", id=4, ports=[open_port]))
    agent.answers(1)
    token = "0123456789abcdef"
    agent.send(encode("listen", id=5, token=token))
    agent.answers(1)
    targets = [[address, open_port, token], [address, open_port, token[::-1]], [address, closed_port, token]]
    agent.send(encode("probe", id=6, targets=targets, seconds=1))
    assert agent.next("reply").fields["missed"] == [1, 2]


@pytest.mark.parametrize("agent", [MODULE, COMMAND], ids=["module", "command"], indirect=True)
def test_it_tells_what_its_host_is(agent: Agent) -> None:
    hello = agent.next("hello").fields
    assert (hello["protocol"], hello["distlaunch"]) == (PROTOCOL, __version__)
    assert {"tensorflow", "keras"} <= hello["packages"].keys()
    assert hello["interpreter"] == sys.executable
    assert hello["addresses"]


@pytest.mark.parametrize("words", [MODULE, COMMAND], ids=["module", "command"])
def test_by_hand_it_says_what_it_is(words: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "this is distlaunch's agent; `distlaunch train` starts it on the hosts of a job\n"


@pytest.mark.parametrize("wrong", [{"distlaunch": "0.0.1"}, {"protocol": 99}])
def test_another_version_is_refused_with_both_named(agent: Agent, tmp_path: Path, wrong: dict[str, Any]) -> None:
    agent.next("hello")
    agent.greet(tmp_path, **wrong)
    message = agent.next("refused").text("message")
    assert f"distlaunch {__version__} (protocol {PROTOCOL})" in message
    assert str(next(iter(wrong.values()))) in message
    assert agent.process.wait(10) == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("!II", 20, 2**32 - 1),
        encode("start", task="worker:0"),
        encode("hello", protocol="no"),
        os.urandom(4096),
    ],
)
def test_what_is_no_greeting_ends_it(agent: Agent, nonsense: bytes) -> None:
    agent.next("hello")
    agent.send(nonsense)
    assert agent.next("refused").text("message")
    assert agent.process.wait(10) == 0


@pytest.mark.parametrize(
    "message",
    [
        encode("reserve", id=2, ports=10**9),
        encode("reserve", id=2, ports=[-1]),
        encode("probe", id=2, targets=[["127.0.0.1", 10**12, ""]], seconds=1),
        encode("compare", b"[" * 100_000, id=2),
        *(
            pytest.param(message, marks=pytest.mark.slow)
            for message in (
                encode("reserve", id=2, ports=-1),
                encode("reserve", id=2, ports=[70_000]),
                encode("reserve", id=2, ports=[True]),
                encode("reserve", id=2, ports=["22"]),
                encode("probe", id=2, targets=[["127.0.0.1", -1, ""]], seconds=1),
                encode("probe", id=2, targets=[3], seconds=1),
                encode("probe", id=2, targets=[["127.0.0.1"]], seconds=1),
                encode("probe", id=2, targets=[], seconds=10**18),
                encode("begin", attempt=0, beat_ms=10**30),
                encode("compare", b"3", id=2),
                encode("code", b"[" * 100_000, id=2, folder="/nonexistent/x"),
            )
        ),
    ],
    ids=range(15),
)
def test_numbers_beyond_all_bounds_end_it(agent: Agent, tmp_path: Path, message: bytes) -> None:
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    agent.send(message)
    assert agent.next("refused", seconds=10).text("message")
    assert agent.process.wait(10) == 0


@pytest.mark.parametrize(
    "lease_s", [10**400, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, -1, 10**18, 1.5))], ids=range(5)
)
def test_a_lease_beyond_all_bounds_ends_it(agent: Agent, tmp_path: Path, lease_s: float) -> None:
    agent.next("hello")
    agent.greet(tmp_path, lease_s=lease_s)
    assert agent.next("refused", seconds=10).text("message")
    assert agent.process.wait(10) == 0


def test_a_later_message_without_sense_ends_it_with_its_tasks(agent: Agent, tmp_path: Path) -> None:
    agent.run_sleeper(tmp_path)
    assert agent.next("line").text("text") == "begun"
    task = psutil.Process(agent.process.pid).children(recursive=True)
    agent.send(encode("start", task="worker:1", attempt=7, argv=["x"], env={}))
    assert "attempt 7" in agent.next("refused").text("message")
    agent.process.wait(10)
    assert not psutil.wait_procs(task, 10)[1]


def test_a_task_runs_and_all_of_it_is_sent(agent: Agent, tmp_path: Path) -> None:
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    assert agent.begin(tmp_path / "run").fields == {"id": 2, "shared": False, "checkpoints": [], "kept": ""}
    agent.start("import os, sys; print('x' * 5_000_000); print('last', file=sys.stderr); os._exit(7)")
    logs: dict[str, int] = {}
    while True:
        frame = agent.next("write", "exit")
        if frame.kind == "exit":
            break
        logs[frame.text("path")] = logs.get(frame.text("path"), 0) + len(frame.payload)
    assert frame.fields["code"] == 7
    assert logs == {"attempts/0/worker-0/stdout.log": 5_000_001, "attempts/0/worker-0/stderr.log": 5}


def test_a_file_that_cannot_be_sent_is_named_at_the_end(agent: Agent, tmp_path: Path) -> None:
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    agent.begin(tmp_path / "run")
    agent.start("import os; os.mkfifo('run/a'); os.symlink('/nowhere/gone', 'run/b'); open('run/c', 'w').close()")
    assert agent.next("exit").fields["code"] == 0
    agent.send(encode("end", id=5))
    assert agent.next("move").fields == {"path": ".c.part.tmp", "to": "c"}
    unsent = "a (is not a regular file), b (No such file or directory)"
    assert agent.next("reply").fields == {"id": 5, "unsent": unsent}


def test_the_end_of_its_connection_ends_it_and_its_tasks(agent: Agent, tmp_path: Path) -> None:
    agent.run_sleeper(tmp_path)
    agent.next("line")
    started = psutil.Process(agent.process.pid).children(recursive=True)
    assert started
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(10) == 0
    assert not psutil.wait_procs(started, 10)[1]


_LEAVES = """
import os, subprocess
pids = []
for without in ("", "DISTLAUNCH_RUN_DIR"):
    env = {name: value for name, value in os.environ.items() if name != without}
    sleep = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True, stdout=-3, stderr=-3)
    pids.append(sleep.pid)
print(*pids, flush=True)
"""


@pytest.mark.parametrize("is_told", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_has_left_a_task_ends_with_the_attempt(agent: Agent, tmp_path: Path, is_told: bool) -> None:
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    agent.begin(tmp_path / "run")
    marks = {"DISTLAUNCH_RUN_DIR": str(tmp_path / "run"), "DISTLAUNCH_ATTEMPT": "0", "DISTLAUNCH_TASK": "worker:0"}
    agent.start(_LEAVES, **marks)
    ended, lives = (psutil.Process(int(pid)) for pid in agent.next("line").text("text").split())
    try:
        assert agent.next("exit").fields["code"] == 0
        assert ended.is_running()
        if is_told:
            agent.send(encode("end", id=5))
            line = agent.next("line").fields
            text = f"ended processes that tasks had left running: sleep ({ended.pid})"
            assert (line["task"], line["text"]) == ("", text)
            assert agent.next("reply").fields["id"] == 5
        else:
            assert agent.process.stdin is not None
            agent.process.stdin.close()
            assert agent.process.wait(10) == 0
        assert not psutil.wait_procs([ended], 10)[1]
        assert lives.is_running()
    finally:
        for each in (ended, lives):
            if each.is_running():
                each.kill()


def test_a_silent_controller_loses_its_lease(agent: Agent, tmp_path: Path) -> None:
    agent.run_sleeper(tmp_path, lease_s=1)
    started = psutil.Process(agent.process.pid).children(recursive=True)
    assert agent.process.wait(20) == 0
    assert not psutil.wait_procs(started, 10)[1]


def test_a_killed_agent_leaves_no_task(agent: Agent, tmp_path: Path) -> None:
    agent.run_sleeper(tmp_path)
    agent.next("line")
    started = psutil.Process(agent.process.pid).children(recursive=True)
    agent.process.kill()
    assert not psutil.wait_procs(started, 10)[1]


def test_code_is_compared_by_content(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("a = 1\n")
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    agent.send(encode("compare", json.dumps({"model.py": "0" * 16, "missing.py": "1" * 16}).encode(), id=3))
    assert agent.next("reply").fields == {"id": 3, "wrong": ["model.py", "missing.py"], "count": 2}


def test_a_copy_that_another_agent_uses_is_waited_for(agent: Agent, tmp_path: Path) -> None:
    """An agent whose connection is gone may live a while; its tasks may still write into the copy."""
    other = Agent(MODULE)
    try:
        for each in (other, agent):
            each.next("hello")
            each.greet(tmp_path)
            each.answers(2)
        assert other.begin(tmp_path / "run").fields["kept"] == ""
        other.start(SLEEPER)
        other.next("beat")
        agent.send(encode("open", id=2, root=str(tmp_path / "run"), nonce="nothing"))
        agent.send(encode("listening", id=3))
        assert agent.next("reply").fields["id"] == 3, "it works meanwhile"
        other.process.stdin.close()
        answer = agent.next("reply").fields
        assert (answer["id"], answer["shared"], answer["kept"]) == (2, False, str(tmp_path / "run.kept-1"))
        assert (tmp_path / "run.kept-1" / "attempts" / "0" / "worker-0" / "stdout.log").exists()
    finally:
        other.end()


def test_a_copy_that_another_agent_keeps_is_refused(agent: Agent, tmp_path: Path) -> None:
    held = CopyFolder(tmp_path / "run")
    agent.next("hello")
    agent.greet(tmp_path, lease_s=1)
    agent.answers(2)
    agent.send(encode("open", id=2, root=str(tmp_path / "run"), nonce="nothing"))
    until, error = time.monotonic() + 30, ""
    while not error and time.monotonic() < until:
        agent.send(encode("beat"))  # renews its lease
        with contextlib.suppress(AssertionError):  # nothing came
            error = agent.next("reply", seconds=0.2).fields["error"]
    assert error.startswith(f"another agent (process {os.getpid()}) uses {tmp_path / 'run'}; ")
    held.remove()


def test_a_folder_that_cannot_be_made_is_told(agent: Agent, tmp_path: Path) -> None:
    """It is no error of the connection: the agent goes on."""
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    long = tmp_path / ("x" * 300)
    agent.send(encode("open", id=2, root=str(long), nonce="nothing"))
    error = agent.next("reply").fields["error"]
    assert error.startswith(f"cannot create {long}: File name too long; choose another runs_dir")
    agent.begin(tmp_path / "run")
    (tmp_path / "run" / "attempts").write_text("in the way")
    agent.start("pass")
    exit = agent.next("exit")
    assert exit.fields["unstartable"].startswith(f"cannot write {tmp_path}/run/attempts/0/worker-0: ")


def test_a_folder_of_another_run_is_not_touched(agent: Agent, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("mine")
    agent.next("hello")
    agent.greet(tmp_path)
    agent.answers(2)
    agent.send(encode("open", id=2, root=str(run), nonce="nothing"))
    assert "belongs to another run" in agent.next("reply").fields["error"]
    assert (run / "config.yaml").read_text() == "mine"
