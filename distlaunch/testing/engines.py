"""The conformance suite of engines: what supervision, jobs and commands rely on, whatever the engine.

A package that provides an engine subclasses `EngineConformance` in its tests:

    class TestMyEngine(EngineConformance):
        slots = 4

        def make(self, folder):
            return my_engine(MySection(kind="my_kind"), Machine.here(), HostFiles())

Each test makes an engine of its own, and enters it as a command does. The tasks are small Python programs (`PROGRAMS`);
an engine that starts no processes can imitate them: the last argument of a task's command is the program's source, so
the engine can compare it with the values of `PROGRAMS`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psutil
import pytest

from distlaunch.agent.messages import Exit, Order
from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.cluster.hosts import TooFewSlotsError
from distlaunch.cluster.spec import split_address
from distlaunch.engines.base import Engine, HostReport, Needs
from distlaunch.plan.script import ScriptJob, plan_script
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.allocation import Allocation, Starter, TaskHandle

DEADLINE_S = 60.0
NUM_LINES = 2_000
MARK = "DISTLAUNCH_CONFORMANCE"
"""Environment variable that the tests set for their tasks, so that processes left behind can be found."""

PROGRAMS = {
    name: textwrap.dedent(source).strip()
    for name, source in {
        "ends": "import os, sys; sys.exit(3 if os.environ['DISTLAUNCH_TASK'] == 'worker:1' else 0)",
        "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "prints": f"""
            import sys
            for number in range({NUM_LINES}):
                print("line", number)
            print("trouble", file=sys.stderr)
            print("the last, without an end", end="")
        """,
        "stops": """
            import signal, sys, threading
            asked = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: asked.set())
            print("up")
            asked.wait()
            print("asked")
            sys.exit(4)
        """,
        "does not stop": """
            import os, signal, subprocess, sys
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            print("up")
            while True:
                signal.pause()
        """,
        "tells": """
            import os
            for name in ("DISTLAUNCH_TASK", "DISTLAUNCH_ATTEMPT", "TF_CONFIG"):
                print(name, os.environ.get(name))
        """,
        "reports": """
            import os
            from distlaunch.base.run_dir import RunDir
            run = RunDir(os.environ["DISTLAUNCH_RUN_DIR"])
            files = run.task(int(os.environ["DISTLAUNCH_ATTEMPT"]), os.environ["DISTLAUNCH_TASK"])
            files.path.mkdir(parents=True, exist_ok=True)
            files.error_json.write_text('{"reason": "as written"}', encoding="utf-8")
        """,
        "reads": """
            import os, pathlib, time
            path = pathlib.Path(os.environ["DISTLAUNCH_RUN_DIR"], "sent.txt")
            print("up")
            while not path.exists() or path.read_text(encoding="utf-8") != "second":
                time.sleep(0.01)
            print("read")
        """,
        "listens": """
            import json, os, signal, socket
            config = json.loads(os.environ["TF_CONFIG"])
            host, port = config["cluster"]["worker"][config["task"]["index"]].rsplit(":", 1)
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind((host, int(port)))
            server.listen()
            print("up")
            signal.pause()
        """,
    }.items()
}


class Attempt:
    """An attempt of a job without supervision: the tests themselves start, watch and stop its tasks.

    Attributes:
        lines: what tasks have printed, as (task, line).
        ends: how tasks have ended, by name.
    """

    def __init__(self, allocation: Allocation, plan: LaunchPlan) -> None:
        self.allocation, self.plan = allocation, plan
        self.lines: list[tuple[str, str]] = []
        self.tasks: dict[str, TaskHandle] = {}
        self.ends: dict[str, Exit] = {}

    @contextlib.contextmanager
    def started(self) -> Generator[Starter]:
        """Start all tasks; none of them is left when the block ends."""
        for task in self.plan.tasks:
            task.files.path.mkdir(parents=True, exist_ok=True)

        def show(task: str, line: str) -> None:
            self.lines.append((task, line))

        with self.allocation.starting(self.plan, show, time.monotonic) as self.starter:
            for task in self.plan.tasks:
                self.start(str(task.task))
            yield self.starter

    def start(self, name: str) -> None:
        """Start a task, perhaps again."""
        (task,) = [task for task in self.plan.tasks if str(task.task) == name]
        self.ends.pop(name, None)
        self.tasks[name] = self.starter.start(task)

    def turn(self) -> None:
        """Wait a moment for the tasks, as supervision does."""
        self.starter.wait(0.1)
        for name, task in self.tasks.items():
            if name not in self.ends and (end := task.poll()) is not None:
                self.ends[name] = end

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Fail if a condition does not come true before the deadline."""
        until = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < until, f"not within {DEADLINE_S:g} s: {what}; {self.ends}, {self.lines[-5:]}"
            self.turn()

    def wait_for_ends(self) -> dict[str, Exit]:
        """Wait until all tasks have ended and their files are here; return how they ended."""
        self.wait_until(lambda: len(self.ends) == len(self.tasks), "all tasks have ended")
        self.starter.collect(lambda: False)
        return self.ends

    def wait_for_line(self, text: str, number: int = 1) -> None:
        """Wait until tasks have printed a line at least `number` times."""
        self.wait_until(lambda: [line for _, line in self.lines].count(text) >= number, f"{number} lines {text!r}")

    def text(self, task: str, stream: str = "stdout") -> str:
        """Return the content of a task's log."""
        (found,) = [each.files for each in self.plan.tasks if str(each.task) == task]
        log = found.stdout_log if stream == "stdout" else found.stderr_log
        return log.read_text(encoding="utf-8")


class EngineConformance:
    """Tests that an engine must pass.

    Attributes:
        slots: maximum number of workers on the hosts of `make`, at least 2; None if there is no limit, so that the
            refusal of too many workers is not tested.
        has_processes: whether tasks are processes of this machine, whose environment the tests can read.
        has_listeners: whether tasks can open ports that `listening` sees.
    """

    slots: int | None = None
    has_processes = True
    has_listeners = True

    def make(self, folder: Path) -> Engine:
        """Return a new engine, as each command makes one.

        Args:
            folder: the folder for files of the engine, which is the working directory of the test.
        """
        raise NotImplementedError

    def lose_host(self, attempt: Attempt, host: str) -> None:
        """Make a host disappear, with its agent."""
        pytest.skip("this engine has no hosts to lose")

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(MARK, str(tmp_path))
        yield
        if self.has_processes:
            left = [process for process in psutil.process_iter() if _is_marked(process, str(tmp_path))]
            assert not psutil.wait_procs(left, 10)[1], "processes remain after the engine's context has exited"

    @contextlib.contextmanager
    def attempt(
        self, engine: Engine, folder: Path, program: str, workers: int = 2, number: int = 0
    ) -> Generator[Attempt]:
        """Allocate and plan an attempt, and release the allocation when the block ends."""
        job = ScriptJob("program", sys.executable, ("-c", PROGRAMS[program]), workers=workers)
        needs = Needs(job.num_tasks, job.num_addresses, job.slots)
        allocation = engine.allocate(needs)
        try:
            run = RunDir(folder / "runs" / "job")
            run.path.mkdir(parents=True, exist_ok=True)
            plan = plan_script(job, run, number, allocation.places, engine=allocation.engine)
            yield Attempt(allocation, plan)
        finally:
            allocation.release()

    # before anything is started

    def test_a_dry_allocation_asks_nobody_and_reserves_nothing(self, tmp_path: Path) -> None:
        engine = self.make(tmp_path)
        for _ in range(2):
            allocation = engine.allocate(Needs(2, 2, {"worker": 2}), dry=True)
            assert len(allocation.places) == 2
            assert allocation.engine
            allocation.release()
        assert engine.count_slots(dry=True) >= 1

    def test_each_task_has_a_place_and_an_address_of_its_own(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine:
            allocation = engine.allocate(Needs(3, 2, {"worker": 2}))
            try:
                assert len(allocation.places) == 3
                addresses = [place.address for place in allocation.places]
                assert addresses[2] == "", "nobody connects to the third task"
                assert len({(place.host, split_address(place.address)[1]) for place in allocation.places[:2]}) == 2
                assert len(set(addresses[:2])) == 2
            finally:
                allocation.release()

    def test_hosts_are_counted_and_too_many_workers_refused(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine:
            slots = engine.count_slots()
            assert slots >= 1
            if self.slots is None:
                return
            assert slots == self.slots
            with pytest.raises(TooFewSlotsError) as refused:
                engine.allocate(Needs(slots + 1, slots + 1, {"worker": slots + 1}))
            assert refused.value.slots == slots
            # the refused request has not kept any slots
            engine.allocate(Needs(slots, slots, {"worker": slots})).release()

    def test_too_few_ports_are_a_mistake_of_the_config(self, tmp_path: Path) -> None:
        needs = Needs(2, 2, {"worker": 2}, ports=[5000])
        with self.make(tmp_path) as engine, pytest.raises(ConfigError, match=r"cluster\.ports: got 1 port for 2 tasks"):
            engine.allocate(needs)

    def test_an_allocation_may_be_released_twice_and_another_follows(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine:
            for _ in range(2):
                allocation = engine.allocate(Needs(2, 2, {"worker": 2}))
                allocation.release_ports()
                allocation.release()
                allocation.release()

    def test_hosts_can_be_examined(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine:
            for _ in range(2):
                reports = engine.examine()
                assert reports
                assert all(isinstance(report, HostReport) and report.name and report.cores > 0 for report in reports)
                assert len({report.name for report in reports}) == len(reports)

    # tasks

    def test_exit_codes_come_as_they_are(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "ends") as attempt, attempt.started():
            ends = attempt.wait_for_ends()
            assert {name: end.code for name, end in ends.items()} == {"worker:0": 0, "worker:1": 3}
            assert not any(end.lost for end in ends.values())

    def test_a_signal_is_a_negative_code(self, tmp_path: Path) -> None:
        with (
            self.make(tmp_path) as engine,
            self.attempt(engine, tmp_path, "is killed", 1) as attempt,
            attempt.started(),
        ):
            assert attempt.wait_for_ends()["worker:0"].code == -signal.SIGKILL

    def test_output_is_complete_when_the_end_is_reported(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "prints") as attempt, attempt.started():
            attempt.wait_until(lambda: len(attempt.ends) == 2, "all tasks have ended")
            lines = [f"line {number}" for number in range(NUM_LINES)]
            for task in ("worker:0", "worker:1"):
                assert attempt.text(task) == "\n".join([*lines, "the last, without an end"])
                assert attempt.text(task, "stderr") == "trouble\n"
                shown = [line for name, line in attempt.lines if name == task]
                numbered = [int(line.removeprefix("line ")) for line in shown if line.startswith("line ")]
                assert numbered == sorted(set(numbered)), "of a flood of lines, the shown ones are in order"
                assert numbered[:100] == list(range(100))
                assert "the last, without an end" in shown

    def test_tasks_know_who_they_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TF_CONFIG", "that of the launcher")
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "tells", number=3) as attempt:
            with attempt.started():
                attempt.wait_for_ends()
            addresses = [place.address for place in attempt.allocation.places]
            for index in range(2):
                text = attempt.text(f"worker:{index}")
                assert f"DISTLAUNCH_TASK worker:{index}\nDISTLAUNCH_ATTEMPT 3\n" in text
                assert all(f'"{address}"' in text for address in addresses), "TF_CONFIG has the addresses"

    def test_what_tasks_write_is_in_the_run_when_the_end_is_reported(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "reports") as attempt, attempt.started():
            attempt.wait_until(lambda: len(attempt.ends) == 2, "all tasks have ended")
            for task in attempt.plan.tasks:
                assert task.files.error_json.read_text(encoding="utf-8") == '{"reason": "as written"}'

    def test_tasks_can_read_a_file_that_is_sent_while_they_run(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "reads") as attempt:
            path = attempt.plan.run_dir / "sent.txt"
            with attempt.started() as starter:
                attempt.wait_for_line("up", 2)
                for text in ("first", "second"):
                    write_atomically(path, text)
                    starter.send_file(path)
                assert {end.code for end in attempt.wait_for_ends().values()} == {0}
            assert [line for _, line in attempt.lines].count("read") == 2

    def test_a_task_that_is_asked_to_stop_ends_by_itself(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "stops") as attempt, attempt.started():
            attempt.wait_for_line("up", 2)
            for task in attempt.tasks.values():
                task.send(Order.STOP, whole_group=False)
            assert {end.code for end in attempt.wait_for_ends().values()} == {4}
            assert [line for _, line in attempt.lines].count("asked") == 2

    def test_a_task_that_does_not_stop_is_killed_with_what_it_started(self, tmp_path: Path) -> None:
        # `_nothing_is_left` then checks that the child of the task is gone too
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(self.make(tmp_path))
            attempt = stack.enter_context(self.attempt(engine, tmp_path, "does not stop", 1))
            stack.enter_context(attempt.started())
            attempt.wait_for_line("up")
            attempt.tasks["worker:0"].send(Order.STOP, whole_group=True)
            attempt.tasks["worker:0"].send(Order.KILL, whole_group=True)
            assert attempt.wait_for_ends()["worker:0"].code == -signal.SIGKILL

    def test_orders_to_a_task_that_has_ended_change_nothing(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "ends", 1) as attempt, attempt.started():
            end = attempt.wait_for_ends()["worker:0"]
            for order in Order:
                attempt.tasks["worker:0"].send(order, whole_group=True)
            attempt.turn()
            assert attempt.tasks["worker:0"].poll() == end, "the end may be asked for again"

    def test_a_task_is_started_again_beside_the_others(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "stops") as attempt, attempt.started():
            attempt.wait_for_line("up", 2)
            attempt.tasks["worker:1"].send(Order.KILL, whole_group=True)
            attempt.wait_until(lambda: "worker:1" in attempt.ends, "the killed task has ended")
            attempt.start("worker:1")
            attempt.wait_for_line("up", 3)
            assert set(attempt.ends) == set()
            for task in attempt.tasks.values():
                task.send(Order.STOP, whole_group=False)
            assert {end.code for end in attempt.wait_for_ends().values()} == {4}

    def test_no_task_is_left_when_its_start_is_left(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine:
            with self.attempt(engine, tmp_path, "does not stop") as attempt, attempt.started():
                attempt.wait_for_line("up", 2)
            assert all(task.poll() is not None for task in attempt.tasks.values())
            # the next attempt of the same command, on the same hosts
            with self.attempt(engine, tmp_path, "ends", number=1) as attempt, attempt.started():
                assert attempt.wait_for_ends()["worker:0"].code == 0

    def test_ports_that_tasks_listen_on_are_seen(self, tmp_path: Path) -> None:
        if not self.has_listeners:
            pytest.skip("tasks of this engine open no ports")
        with self.make(tmp_path) as engine, self.attempt(engine, tmp_path, "listens") as attempt:
            addresses = [place.address for place in attempt.allocation.places]
            with attempt.started():
                attempt.wait_for_line("up", 2)
                assert attempt.allocation.listening([*addresses, "127.0.0.1:9"]) == set(addresses)
                attempt.allocation.release_ports()
                assert attempt.allocation.listening(addresses) == set(addresses)

    # hosts

    def test_a_lost_host_is_told_and_another_attempt_does_without_it(self, tmp_path: Path) -> None:
        with self.make(tmp_path) as engine:
            with self.attempt(engine, tmp_path, "stops") as attempt, attempt.started():
                attempt.wait_for_line("up", 2)
                host = attempt.plan.tasks[1].host
                self.lose_host(attempt, host)
                attempt.wait_until(lambda: "worker:1" in attempt.ends, "the task of the lost host has ended")
                assert attempt.ends["worker:1"].lost, "why the host does not answer any more"
                attempt.allocation.note_host_failure(host)
            with self.attempt(engine, tmp_path, "ends", workers=1, number=1) as attempt, attempt.started():
                assert attempt.wait_for_ends()["worker:0"].code == 0


def _is_marked(process: psutil.Process, mark: str) -> bool:
    """Return whether a process was started by this test, and is still running."""
    try:
        is_running = process.status() != psutil.STATUS_ZOMBIE
        return process.pid != os.getpid() and is_running and process.environ().get(MARK) == mark
    except psutil.Error:
        return False
