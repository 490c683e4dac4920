"""A thousand tasks, and a task that prints a gigabyte, under the real command."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from pathlib import Path

import psutil
import pytest
from supervised import Recorder, processes_of, supervise, wait_until
from test_run import Runner, end

from distlaunch.base.events import TaskStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.ports import pick_ports
from distlaunch.cluster.spec import Place
from distlaunch.plan.script import ScriptJob, plan_script

MEMORY_BYTES = 100_000_000


@pytest.fixture
def runner(run_dir: Path) -> Runner:
    return Runner(run_dir)


class Watch:
    """The most that a process has had of memory, descriptors and children. The kernel keeps the first itself."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.memory = self.files = self.children = 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _look(self) -> None:
        try:
            while self._process.status() != psutil.STATUS_ZOMBIE:
                peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
                self.memory = max(self.memory, int(peak[1]) * 1024 if peak else 0)
                self.files = max(self.files, self._process.num_fds())
                self.children = max(self.children, len(self._process.children()))
                time.sleep(0.02)
        except (psutil.Error, OSError):
            return


@pytest.mark.slow  # in CI test_run.py, with fewer
def test_a_thousand_tasks(runner: Runner) -> None:
    """They wait for a mark, so that all of them run at once."""
    program = 'read line < "$MARKER/gate"; echo "$DISTLAUNCH_TASK"'
    os.mkfifo(runner.directory / "gate")
    gate = os.open(runner.directory / "gate", os.O_RDWR)
    process = runner.start("-q", "--workers", "1000", "sh", "-c", program)
    watch = Watch(process.pid)
    wait_until(lambda: len(processes_of_launcher(process.pid)) >= 1000, timeout_s=120)
    os.write(gate, b"\n" * 1000)  # each task takes one
    code, out, err = end(process)
    os.close(gate)
    watch.join()
    assert (code, out, err) == (0, "", "")
    told = [files.stdout_log.read_text() for files in runner.run_dir("sh").tasks(0).values()]
    assert len(told) == 1000
    assert set(told) == {f"worker:{index}\n" for index in range(1000)}
    assert {event.task for event in runner.events(TaskStarted, "sh")} == {f"worker:{index}" for index in range(1000)}
    assert watch.memory < MEMORY_BYTES, watch.memory
    assert watch.files < 5200
    assert not processes_of(runner.directory)


def processes_of_launcher(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


@pytest.mark.slow
def test_a_thousand_python_scripts(runner: Runner) -> None:
    process = runner.start("-q", "--workers", "1000", runner.script("print(TASK)\n"))
    watch = Watch(process.pid)
    assert end(process, 300) == (0, "", "")
    watch.join()
    told = {task: files.stdout_log.read_text().strip() for task, files in runner.run_dir().tasks(0).items()}
    assert told == {f"worker:{index}": f"worker:{index}" for index in range(1000)}
    assert watch.memory < MEMORY_BYTES, watch.memory


FLOOD = """\
block = b''.join(b'%015d\\n' % number for number in range(1 << 16))
if TASK == 'worker:0':
    for number in range({blocks}):
        sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    mark('flooded')
else:
    while not list(HOME.glob('flooded-*')):
        print(time.monotonic(), flush=True)
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_gigabyte_of_output(run_dir: Path) -> None:
    """Every byte is in the log, and the lines of another task come while it is written, each at its time."""
    (run_dir / "home").mkdir()
    runner = Runner(run_dir / "home")
    blocks = 1024
    script = runner.directory / runner.script(FLOOD.format(blocks=blocks))
    run, late = RunDir(run_dir / "run"), []
    run.path.mkdir()

    class Listener(Recorder):
        def line(self, task: str, text: str) -> None:
            if task == "worker:1":
                late.append(time.monotonic() - float(text))

    held = pick_ports(2)
    began = time.monotonic()
    environ = {**runner.env, "MARKER": str(runner.directory)}
    try:
        places = [Place("", f"127.0.0.1:{port}") for port in held.numbers]
        plan = plan_script(ScriptJob("script", str(script), workers=2), run, 0, places)
        memory = psutil.Process().memory_info().rss
        assert supervise(plan, Listener(), environ).status == "done"
    finally:
        held.release()
    assert psutil.Process().memory_info().rss - memory < 20_000_000
    log = run.task(0, "worker:0").stdout_log
    block = b"".join(b"%015d\n" % number for number in range(1 << 16))
    expected, found = hashlib.sha1(), hashlib.sha1()
    for _ in range(blocks):
        expected.update(block)
    with log.open("rb") as file:
        while data := file.read(1 << 20):
            found.update(data)
    assert log.stat().st_size == blocks * len(block) == 1 << 30
    assert found.hexdigest() == expected.hexdigest()
    log.unlink()
    seconds = time.monotonic() - began
    assert len(late) > 10, json.dumps({"seconds": seconds})
    assert sorted(late)[len(late) // 2] < 0.2
    assert max(late) < 2
