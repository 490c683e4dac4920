"""The loop of docs/automation.md on a machine that is taken away again and again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from real import final_state
from supervised import processes_of, wait_until
from test_automation import block
from tiny_job import environment, kill_all, run_command, write_job

from distlaunch.base.event_files import read_events
from distlaunch.base.events import Event, RunEnded, StepsDone, TaskStarted
from distlaunch.base.run_dir import RunDir

MODULE = (Path(__file__).parent / "user_code" / "preemption_loop.py").read_text()
SECTIONS = {
    "data": {"function": "mine.py:data", "global_batch": 8},
    "compile": {"optimizer": "adam", "loss": "mse"},
    "train": {"epochs": 40, "log_every_steps": 1, "steps_per_call": 1},
    "checkpoint": {"every_steps": 16},
}
NUM_KILLS = 20


class Loop:
    """The loop for a run with a given name; it is started again when a signal has ended it."""

    def __init__(self, project: Path, name: str, *options: str) -> None:
        self.run = RunDir(project / "runs" / name)
        self._words = ["sh", "retry.sh", "mine.yaml", "--name", name, "--quiet", *options]
        self._project = project
        self.codes: list[int] = []
        self._start()

    def _start(self) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**environment(PAUSE_S="0", MARKER=str(self._project)), "PATH": path}
        with (self._project / f"{self.run.name}.log").open("ab") as log:
            self.process = subprocess.Popen(self._words, cwd=self._project, env=env, stdout=log, stderr=log)

    def launcher(self) -> psutil.Process | None:
        """Return the process of `train`, if there is one."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if "train" in child.cmdline():
                    return child
        return None

    def kill(self, draw: random.Random) -> str:
        """Kill something of the loop at a random time, wait until it is gone, and return what it was.

        Returns:
            An empty text if the loop has ended well before that.
        """
        number = draw.choice((signal.SIGTERM, signal.SIGKILL))
        when = draw.choice(("at once", "when a task is up", "steps", "steps", "steps"))
        what = draw.choice(("launcher", "launcher", "task", "loop")) if when == "steps" else "launcher"
        steps = draw.randint(1, 120)
        wait_until(lambda: self.launcher() or self.process.poll() is not None, timeout_s=60)
        if (launcher := self.launcher()) is None:
            assert self.process.wait() == 0
            return ""
        since = launcher.create_time() - 0.1
        if when == "when a task is up":
            wait_until(lambda: self._task(since) or not is_there(launcher), timeout_s=60)
        elif when == "steps":
            wait_until(lambda: self._num_steps(since) >= steps or not is_there(launcher), timeout_s=60)
        if not is_there(launcher):
            assert self.process.wait(60) == 0
            return ""
        if what == "loop":
            self.process.terminate()
            self.codes.append(self.process.wait(60))
            self._start()
        else:
            os.kill(self._task(since) if what == "task" else launcher.pid, number)
        wait_until(lambda: not is_there(launcher), timeout_s=60)
        shown = "SIGTERM" if what == "loop" else number.name
        return f"{shown} to the {what} {when if when != 'steps' else f'after {steps} steps'}"

    def _events(self, since: float) -> list[Event]:
        events = read_events(self.run.events) if self.run.events.exists() else []
        return [event for event in events if event.time >= since]

    def _task(self, since: float) -> int:
        return next((event.pid for event in self._events(since) if isinstance(event, TaskStarted)), 0)

    def _num_steps(self, since: float) -> int:
        steps = [event.step for event in self._events(since) if isinstance(event, StepsDone)]
        return max(steps) - min(steps) + 1 if steps else 0

    def end(self) -> int:
        return self.process.wait(300)


def is_there(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextlib.contextmanager
def ending(project: Path, *loops: Loop) -> Iterator[None]:
    try:
        yield
    finally:
        for loop in loops:
            kill_all(loop.process.pid)
        for process in processes_of(project):
            process.kill()


@pytest.mark.slow
def test_a_loop_over_many_kills_ends_as_one_run(tmp_path: Path) -> None:
    """A second loop, whose name begins as the first one's, trains something else beside it."""
    write_job(tmp_path, MODULE, **SECTIONS).rename(tmp_path / "mine.yaml")
    (tmp_path / "retry.sh").write_text(block("retry.sh"))
    other = ("--set", "seed=7", "--set", "train.epochs=40")
    for words in (("--name", "whole"), ("--name", "whole-50", *other)):
        done = run_command("train", "mine.yaml", "--quiet", *words, cwd=tmp_path)
        assert done.code == 0, done.text
    draw = random.Random(0)
    net, beside = Loop(tmp_path, "net"), Loop(tmp_path, "net-50", *other)
    with ending(tmp_path, net, beside):
        for number in range(NUM_KILLS):
            killed = net.kill(draw)
            print(f"{number}: {killed}; beside it: {beside.kill(draw) or 'nothing'}", flush=True)
            assert killed, "the run was done too soon"
        assert net.end() == 0, (tmp_path / "net.log").read_text()
        assert beside.end() == 0, (tmp_path / "net-50.log").read_text()
        wait_until(lambda: not processes_of(tmp_path), timeout_s=30)
    assert set(net.codes + beside.codes) <= {4}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["net", "net-50", "whole", "whole-50"]
    for name, whole in (("net", "whole"), ("net-50", "whole-50")):
        run = RunDir(tmp_path / "runs" / name)
        found, expected = final_state(run), final_state(RunDir(tmp_path / "runs" / whole))
        assert found.keys() == expected.keys()
        assert [key for key in found if not np.array_equal(found[key], expected[key])] == []
        assert [event.status for event in read_events(run.events) if isinstance(event, RunEnded)][-1] == "done"
