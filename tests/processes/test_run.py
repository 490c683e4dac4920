"""`distlaunch run` with scripts that take no time: what they see, and what becomes of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from real import launchers
from supervised import REPOSITORY, processes_of, wait_until

from distlaunch.base.event_files import read_events
from distlaunch.base.events import RunEnded, TaskFailed, TaskRestarted, TaskStarted
from distlaunch.base.heartbeat import BEAT_S
from distlaunch.base.liveness import read_liveness
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.hardware import POOL_SIZES
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import decide
from distlaunch.runs.report import read_report
from tests.conftest import is_cold

HEAD = (Path(__file__).parent / "user_code" / "run.py").read_text()
HANG = "hang()\n"


class Runner:
    """Runs the command in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        inherited = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "FORCE_COLOR")}
        self.env = {
            **inherited,
            "PYTHONPATH": REPOSITORY,
            "MARKER": str(directory),
            "COLUMNS": "200",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def script(self, text: str, name: str = "job.py") -> str:
        (self.directory / name).write_text(HEAD + text)
        return name

    def start(self, *words: str) -> subprocess.Popen[str]:
        if not is_cold():
            return launchers().start_command("distlaunch", ("run", *words), self.directory, self.env)
        return subprocess.Popen(
            [sys.executable, "-m", "distlaunch", "run", *words],
            cwd=self.directory,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *words: str) -> tuple[int, str, str]:
        return end(self.start(*words))

    def run_dir(self, name: str = "job") -> RunDir:
        return RunDir(self.directory / "runs" / name)

    def events(self, kind: type, name: str = "job") -> list[Any]:
        return [event for event in read_events(self.run_dir(name).events) if isinstance(event, kind)]

    def wait_hanging(self, many: int) -> None:
        wait_until(lambda: len(list(self.directory.glob("hanging-*"))) >= many)


def end(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture
def runner(run_dir: Path) -> Runner:
    return Runner(run_dir)


LOOK = """\
import pickle, threading
class Thing: pass
main = sys.modules["__main__"]
seen = {name: str(vars(main).get(name)) for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__")}
seen |= {"argv": sys.argv, "path": sys.path[:2], "spec": main.__spec__ and main.__spec__.name,
         "pickled": type(pickle.loads(pickle.dumps(Thing()))).__module__, "same": vars(main) is globals(),
         "term": str(signal.getsignal(signal.SIGTERM)), "int": str(signal.getsignal(signal.SIGINT)),
         "builtins": type(__builtins__).__name__, "loader": type(__loader__).__name__,
         "fd": os.environ.get("DISTLAUNCH_LIFELINE_FD")}
print(json.dumps(seen))
"""


@pytest.mark.parametrize("words", [["folder/link.py"], ["-m", "pack.mod"], ["-m", "pack"]])
def test_a_script_sees_what_it_sees_under_python(runner: Runner, words: list[str]) -> None:
    runner.script(LOOK)
    (runner.directory / "folder").mkdir()
    (runner.directory / "folder/link.py").symlink_to(runner.directory / "job.py")
    package = runner.directory / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("mod.py", "__main__.py"):
        (package / name).write_text(HEAD + LOOK)
    rest = ["--flag", "--", "-m", "x y"]
    env = {**runner.env, "DISTLAUNCH_TASK": "worker:0", "DISTLAUNCH_ATTEMPT": "0", "PYTHONUNBUFFERED": "1"}
    plain = subprocess.run([sys.executable, *words, *rest], cwd=runner.directory, env=env, capture_output=True)
    code, _, err = runner("-q", "--name", "look", *words, *rest)
    assert (code, err) == (0, "")
    told = json.loads(runner.run_dir("look").task(0, "worker:0").stdout_log.read_bytes())
    assert told == json.loads(plain.stdout)
    assert read_report(runner.run_dir("look")).command == (*words, *rest)


def test_a_traceback_is_that_of_the_script_alone(runner: Runner) -> None:
    name = runner.script("def inner():\n    raise ValueError('no')\n\n\ninner()\n")
    env = {**runner.env, "DISTLAUNCH_TASK": "worker:0", "DISTLAUNCH_ATTEMPT": "0"}
    plain = subprocess.run([sys.executable, name], cwd=runner.directory, env=env, capture_output=True, text=True)
    assert runner("-q", name)[0] == 3
    assert runner.run_dir().task(0, "worker:0").stderr_log.read_text() == plain.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_share_the_cores(runner: Runner, workers: int) -> None:
    """Tasks share the cores. A pool size that the user has set is kept."""
    runner.env["OMP_NUM_THREADS"] = "7"
    name = runner.script("import os, json\nprint(json.dumps(dict(os.environ)))\n")
    assert runner("-q", "--workers", str(workers), name)[0] == 0
    settings = decide({"": Machine(runner.env).hardware}, {"": workers}).of("").variables
    expected = {name: value for name, value in settings.items() if name in POOL_SIZES}
    assert expected["OMP_NUM_THREADS"] == "7"
    for index in range(workers):
        told = json.loads(runner.run_dir().task(0, f"worker:{index}").stdout_log.read_bytes())
        assert {pool: told[pool] for pool in POOL_SIZES if pool in told} == expected


def test_threads_and_processes_of_a_script(runner: Runner) -> None:
    """They outlive the script's last line, and find its `__main__`."""
    text = """\
import atexit, multiprocessing, pickle, threading
class Thing: pass
def name(): return type(pickle.loads(pickle.dumps(Thing()))).__module__
def outlive():
    threading.main_thread().join()
    print(name())
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(abs, (-3,)), pool.apply(name))
    threading.Thread(target=outlive).start()
    atexit.register(lambda: print("end", name()))
"""
    code, out, err = runner(runner.script(text))
    assert (code, err) == (0, "")
    assert out.splitlines()[:3] == ["3 __mp_main__", "__main__", "end __main__"]


def test_each_task_gets_its_place(runner: Runner) -> None:
    text = "print(json.dumps([json.loads(os.environ['TF_CONFIG']), os.environ['TF_GRPC_REUSE_PORT']]), flush=True)\n"
    name = runner.script(f"{text}mark('told')\nwait_for('told-*', 5)\n")
    assert runner("-q", "--workers", "2", "--ps", "1", "--evaluator", name)[0] == 0
    told = {}
    for task in ("chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"):
        config, reuse = json.loads(runner.run_dir().task(0, task).stdout_log.read_text().splitlines()[0])
        told[task] = config["task"]
        assert {job: len(addresses) for job, addresses in config["cluster"].items()} == {
            "chief": 1,
            "worker": 2,
            "ps": 1,
        }
        assert reuse == "1"
    assert told["worker:1"] == {"type": "worker", "index": 1}
    assert told["evaluator:0"] == {"type": "evaluator", "index": 0}


def test_output_and_the_summary(runner: Runner) -> None:
    code, out, err = runner("--workers", "2", runner.script("print('hello', flush=True)\n"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert sorted(lines[:2]) == ["[worker:0] hello", "[worker:1] hello"]
    assert [line.split() for line in lines[2:]] == [[], ["status", "done"], ["run", "runs/job"]]
    again = subprocess.run(
        [sys.executable, "-m", "distlaunch", "report", "runs/job"], cwd=runner.directory, env=runner.env,
        capture_output=True, text=True,
    )  # fmt: skip
    assert [line.split() for line in again.stdout.splitlines()[:3]] == [
        ["run", "runs/job"],
        ["script", "job.py"],
        ["status", "done"],
    ]


def test_json_events(runner: Runner) -> None:
    code, out, err = runner("--json", "--workers", "2", runner.script("print('x')\n"))
    assert (code, err) == (0, "")
    first, *others, last = [json.loads(line)["event"] for line in out.splitlines()]
    assert (first, last) == ("CommandStarted", "CommandEnded")
    assert sorted(others) == ["RunEnded", "TaskStarted", "TaskStarted"]


def test_a_second_run_has_its_own_directory(runner: Runner) -> None:
    name = runner.script("")
    for _ in range(2):
        assert runner("-q", name) == (0, "", "")
    assert sorted(path.name for path in (runner.directory / "runs").iterdir()) == ["job", "job-2"]


@pytest.mark.parametrize(
    ("end_of_one", "expected"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("raise ValueError('no')", "ValueError: no"),
        pytest.param("sys.exit(7)", "ended with exit code 7", marks=pytest.mark.slow),
    ],
)
def test_the_first_failure_ends_all_and_is_named(runner: Runner, end_of_one: str, expected: str) -> None:
    name = runner.script(f"if TASK == 'worker:1':\n    wait_for('hanging-*', 2)\n    {end_of_one}\nhang()\n")
    code, out, err = runner("--workers", "3", name)
    assert code == (75 if "SIGKILL" in expected else 3)
    assert re.search(rf"^runs/\S+ failed: worker:1 on \S+: {re.escape(expected)}", err, re.MULTILINE), err
    assert "log  runs/job/attempts/0/worker-1/stderr.log" in err
    assert "worker:1 failed; stopping worker:0, worker:2" in out
    assert [event.failed_task for event in runner.events(TaskFailed)] == ["worker:1"]


@pytest.mark.parametrize("restarts", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_script_that_has_raised_and_does_not_end_is_named(runner: Runner, restarts: str) -> None:
    """A task that has raised is named even if it does not exit. With JAX, the exit waits for the other processes."""
    text = "import atexit\nif TASK == 'worker:1' and not ATTEMPT:\n    atexit.register(hang)\n"
    text += "    raise ValueError('boom')\nif not ATTEMPT:\n    hang()\n"
    code, out, err = runner("--workers", "2", "--restarts", restarts, runner.script(text))
    assert (code, "failed: worker:1" in err) == ((3, True) if restarts == "0" else (0, False)), out + err
    assert "ValueError: boom" in out + err
    assert "killed by" not in out + err


def test_a_worker_may_end_early(runner: Runner) -> None:
    name = runner.script("if TASK != 'worker:0':\n    wait_for('first-*')\nelse:\n    mark('first')\n")
    assert runner("-q", "--workers", "3", "--stop-timeout", "0.001", name) == (0, "", "")


def test_who_left_is_named_by_those_that_still_needed_it(runner: Runner) -> None:
    text = """\
if TASK == 'worker:1':
    sys.exit()
wait_for('runs/job/attempts/0/gone')
class UnavailableError(Exception): pass
raise UnavailableError('Socket closed')
"""
    process = runner.start("--workers", "2", runner.script(text))
    started = runner.run_dir().task(0, "worker:1").events
    wait_until(lambda: started.exists() and started.read_text().endswith("\n"))
    pid = json.loads(started.read_text())["pid"]
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    (runner.directory / "runs/job/attempts/0/gone").touch()
    code, _, err = end(process)
    assert code == 3
    assert "worker:1 had ended with exit code 0, and worker:0 was not done: UnavailableError: Socket closed" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_sigterm_is_passed_on(runner: Runner, number: signal.Signals) -> None:
    process = runner.start("--workers", "2", runner.script(HANG))
    runner.wait_hanging(2)
    process.send_signal(number)
    code, out, err = end(process)
    assert (code, err) == (4, "")
    assert "stopped" in out
    assert [event.status for event in runner.events(RunEnded)] == ["stopped"]


UNREAD = """\
def stop(*_):
    (HOME / f"stopped-{TASK}-{ATTEMPT}").touch()
    os._exit(143)


signal.signal(signal.SIGTERM, stop)
mark("hanging")
while True:
    print("x" * 1000, flush=True)
"""


@pytest.fixture
def buffered(runner: Runner) -> Runner:
    """Its command writes through a buffer, whose lock a stuck thread holds, as it does for most users."""
    runner.env.pop("PYTHONUNBUFFERED", None)
    return runner


def wait_unread(process: subprocess.Popen[str]) -> None:
    """Nobody reads its output: until the pipe is as full as it gets."""
    assert process.stdout is not None
    pipe, capacity = process.stdout.fileno(), fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)

    def is_full() -> bool:
        waiting = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
        return int.from_bytes(waiting, sys.byteorder) > capacity - select.PIPE_BUF

    wait_until(is_full)


@pytest.mark.parametrize("then", ["read", "closed"])
def test_a_reader_that_does_not_read_holds_nothing(buffered: Runner, then: str) -> None:
    """Signals reach the tasks, and the job ends; only the command's last words wait for who reads them."""
    process = buffered.start("--workers", "2", buffered.script(UNREAD))
    buffered.wait_hanging(2)
    wait_unread(process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: len(list(buffered.directory.glob("stopped-*"))) == 2)
    wait_until(lambda: not buffered.run_dir().is_busy())
    assert [event.status for event in buffered.events(RunEnded)] == ["stopped"]
    assert process.poll() is None
    if then == "closed":
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
    code, out, err = end(process)
    assert (code, err) == (4, "")
    if then == "read":
        assert [line.split() for line in out.splitlines()[-3:]] == [[], ["status", "stopped"], ["run", "runs/job"]]
        assert "\nstopping (SIGTERM)\n" in out


def test_ctrl_c_ends_the_wait_for_a_reader(buffered: Runner) -> None:
    process = buffered.start("--workers", "2", buffered.script(UNREAD))
    buffered.wait_hanging(2)
    wait_unread(process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: [event.status for event in buffered.events(RunEnded)] == ["interrupted"])
    wait_until(lambda: not buffered.run_dir().is_busy())
    until = time.monotonic() + 15
    while process.poll() is None and time.monotonic() < until:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
    assert end(process)[0] == 4


def test_a_job_is_started_again_though_nobody_reads(buffered: Runner) -> None:
    text = """\
if ATTEMPT:
    sys.exit()
for _ in range(300):
    print("x" * 1000, flush=True)
wait_for("full")
os.kill(os.getpid(), 9)
"""
    process = buffered.start("--restarts", "1", buffered.script(text))
    wait_unread(process)
    (buffered.directory / "full").touch()
    wait_until(lambda: [event.status for event in buffered.events(RunEnded)] == ["failed", "done"])
    code, out, err = end(process)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if not line.startswith("xxx")]
    assert lines[0].startswith("restart 1 of 1: worker:0 killed by SIGKILL")
    assert [line.split() for line in lines[-4:-1]] == [[], ["status", "done"], ["run", "runs/job"]]


@pytest.mark.parametrize(("code", "expected"), [(42, 4), (143, 4), (0, 0), (1, 3)])
def test_a_script_that_handles_sigterm_decides(runner: Runner, code: int, expected: int) -> None:
    name = runner.script(f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\nhang()\n")
    process = runner.start("-q", name)
    runner.wait_hanging(1)
    process.send_signal(signal.SIGTERM)
    ended = end(process)
    assert ended[0] == expected, ended


def test_a_script_that_ignores_sigterm_is_killed(runner: Runner) -> None:
    process = runner.start("--stop-timeout", "0.3", runner.script(f"signal.signal(15, signal.SIG_IGN)\n{HANG}"))
    runner.wait_hanging(1)
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code == 3
    assert "did not stop within 0.3 s and was killed\n" in err


def test_preemption_told_by_a_task_ends_the_others(runner: Runner) -> None:
    name = runner.script("if TASK == 'worker:1':\n    wait_for('hanging-*')\n    sys.exit(42)\nhang()\n")
    assert runner("-q", "--workers", "2", name) == (4, "", "")


def test_ctrl_c(runner: Runner) -> None:
    process = runner.start("--workers", "2", runner.script(HANG))
    runner.wait_hanging(2)
    process.send_signal(signal.SIGINT)
    code, out, _ = end(process)
    assert code == 4
    assert "stopping; press Ctrl-C again to end at once" in out


@pytest.mark.parametrize("target", ["job.py", "sleep"])
def test_nothing_survives_a_killed_launcher(runner: Runner, target: str) -> None:
    runner.script(f"signal.signal(15, signal.SIG_IGN)\nif os.fork() == 0:\n    hang()\n{HANG}")
    process = runner.start("-q", "--workers", "2", target, *(["300"] if target == "sleep" else []))
    if target == "sleep":
        wait_until(lambda: len(runner.events(TaskStarted, "sleep")) == 2)
    else:
        runner.wait_hanging(2)
        wait_until(lambda: len(processes_of(runner.directory)) >= 6)
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_of(runner.directory), timeout_s=5)


def test_restarts(runner: Runner) -> None:
    text = """\
print(ATTEMPT, json.loads(os.environ['TF_CONFIG'])['cluster']['worker'], flush=True)
mark('up')
wait_for(f'up-*-{ATTEMPT}', 2)
if TASK == 'worker:1' and ATTEMPT < 2:
    os.kill(os.getpid(), 9)
"""
    code, out, err = runner("--workers", "2", "--restarts", "3", "--backoff", "0.01", runner.script(text))
    assert (code, err) == (0, "")
    assert "restart 1 of 3 in 0.01 s: worker:1 killed by SIGKILL" in out
    assert "restart 2 of 3 in 0.02 s: worker:1 killed by SIGKILL" in out
    assert [event.status for event in runner.events(RunEnded)] == ["failed", "failed", "done"]
    told = [runner.run_dir().task(attempt, "worker:0").stdout_log.read_text() for attempt in range(3)]
    assert [text[0] for text in told] == ["0", "1", "2"]
    assert len({text[1:] for text in told}) == 3  # other ports each time


def test_an_attempt_that_cannot_be_prepared_leaves_the_failure_before_it(runner: Runner) -> None:
    """If an attempt cannot be prepared, perhaps because the disk is full, the previous failure is still reported."""
    text = (
        "plan = Path(os.environ['DISTLAUNCH_RUN_DIR']) / 'environment.json'\nplan.unlink()\nplan.mkdir()\nsys.exit(5)\n"
    )
    code, out, err = runner("--restarts", "2", runner.script(text))
    assert code == 3
    assert "restart 2 of 2: the last one could not start the tasks: " in out
    assert "warning: cannot be restarted: " in err
    assert "failed: ended with exit code 5" in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("text", "attempts"),
    [
        ("sys.exit(5)", 3),
        ("os._exit(1)", 3),
        ("sys.exit(2)", 1),  # called wrongly
        ("sys.exit(200)", 3),
        ("raise ImportError('no')", 1),
        ("raise ValueError('no')", 2),  # the same twice in a row
        ("raise ValueError(f'no {ATTEMPT}')", 3),
    ],
)
def test_what_is_worth_a_restart(runner: Runner, text: str, attempts: int) -> None:
    assert runner("-q", "--restarts", "2", runner.script(text))[0] == 3
    assert len(runner.events(RunEnded)) == attempts


def test_what_helps_is_told(runner: Runner) -> None:
    text = "class Metric: pass\nmark('up')\nwait_for('up-*', 2)\nMetric().reset_states()\n"
    code, _, err = runner("--workers", "2", runner.script(text))
    assert code == 3
    assert "AttributeError: 'Metric' object has no attribute 'reset_states'" in err
    assert (
        "hint  write `reset_state()`, its name in Keras 3, or install tf_keras and set TF_USE_LEGACY_KERAS=1\n" in err
    )


def test_stop(runner: Runner) -> None:
    process = runner.start("-q", "--workers", "2", runner.script(HANG))
    runner.wait_hanging(2)
    stopped = subprocess.run(
        [sys.executable, "-m", "distlaunch", "stop", "runs/job"], cwd=runner.directory, env=runner.env,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (stopped.returncode, stopped.stdout) == (0, "runs/job: stopped\n")
    assert end(process)[0] == 4


def test_the_chief_ends_a_job_of_servers(runner: Runner) -> None:
    """A worker that is killed comes again, and one that ends by itself has done its part."""
    text = """\
if TASK == 'worker:0' and not list(HOME.glob('hanging-worker:0-*')):
    mark('hanging')
    os.kill(os.getpid(), 9)
if TASK == 'worker:1':
    sys.exit()
if TASK != 'chief:0':
    (HOME / f'serving-{TASK}').touch()
    hang()
wait_for('serving-*', 2)
"""
    code, out, err = runner("--workers", "2", "--ps", "1", runner.script(text))
    assert (code, err) == (0, "")
    assert "worker:0 was killed by SIGKILL; restarted" in out
    assert [event.restarted_task for event in runner.events(TaskRestarted)] == ["worker:0"]


def test_a_server_that_fails_by_itself_fails_the_job(runner: Runner) -> None:
    name = runner.script("if TASK == 'ps:0':\n    raise ValueError('no')\nhang()\n")
    code, _, err = runner("-q", "--workers", "1", "--ps", "1", "--restarts", "0", name)
    assert code == 3
    assert "failed: ps:0" in err


def test_an_evaluator_that_fails_is_no_failure(runner: Runner) -> None:
    text = "if TASK == 'evaluator:0':\n    mark('seen')\n    raise ValueError('no')\nwait_for('told')\n"
    process = runner.start("--evaluator", runner.script(text))
    wait_until(lambda: runner.run_dir().task(0, "evaluator:0").error_json.exists())
    wait_until(lambda: len(processes_of(runner.directory)) == 3)  # launcher, warden, worker
    (runner.directory / "told").touch()
    code, _, err = end(process)
    assert code == 0
    assert "warning: evaluator:0" in err


def test_who_is_waited_for_after_the_workers_is_told(runner: Runner) -> None:
    name = runner.script("if TASK == 'evaluator:0':\n    hang()\nwait_for('hanging-*')\n")
    code, out, err = runner("--evaluator", "--start-timeout", "2", name)
    assert code == 0, out + err
    assert "the workers are done; waiting up to 2 s for evaluator:0\n" in out
    assert "warning: runs/job: evaluator:0 was stopped because it was still running 2 s after the other tasks" in err
    assert "checkpoint" not in out + err, "of which nobody knows"


def test_who_has_not_opened_its_port_is_named(runner: Runner) -> None:
    text = """\
import socket
config = json.loads(os.environ['TF_CONFIG'])
port = int(config['cluster']['worker'][config['task']['index']].rpartition(':')[2])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(('127.0.0.1', port))
if TASK != 'worker:1':
    server.listen()
hang()
"""
    code, _, err = runner("--workers", "3", "--start-timeout", "2", runner.script(text))
    assert code == 75
    assert re.search(r"failed: worker:1 on \S+: worker:1 \(127\.0\.0\.1:\d+\) did not come up within 2 s", err), err
    assert "hang" in runner.run_dir().task(0, "worker:0").stderr_log.read_text()  # the stacks


def test_tasks_that_open_no_ports_have_all_the_time(runner: Runner) -> None:
    process = runner.start("-q", "--workers", "2", "--start-timeout", "2", runner.script("wait_for('told')\n"))
    heartbeat = runner.run_dir().task(0, "worker:1").heartbeat
    wait_until(lambda: read_liveness(heartbeat).beats * BEAT_S > 2.5)
    (runner.directory / "told").touch()
    assert end(process) == (0, "", "")


@pytest.mark.slow
def test_a_suspended_task_is_found(runner: Runner) -> None:
    text = "time.sleep(1)\nif TASK == 'worker:1':\n    os.kill(os.getpid(), signal.SIGSTOP)\nhang()\n"
    code, _, err = runner("--workers", "2", "--stall-timeout", "1", runner.script(text))
    assert code == 75
    assert "worker:1 on" in err
    assert "sent no heartbeat (its process is suspended, as by SIGSTOP) for 1 s (--stall-timeout)" in err


def test_the_log_that_is_quoted_is_named(runner: Runner) -> None:
    code, _, err = runner(runner.script("print('no such thing', flush=True)\nos._exit(5)\n"))
    assert code == 3
    assert "  no such thing\n" in err
    assert "log  runs/job/attempts/0/worker-0/stdout.log\n" in err


def test_any_program(runner: Runner) -> None:
    code, out, err = runner("--workers", "2", "--", "sh", "-c", "echo $DISTLAUNCH_TASK -- $1", "-", "--x")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()[:2]) == ["[worker:0] worker:0 -- --x", "[worker:1] worker:1 -- --x"]
    assert runner("-q", "sh", "-c", "exit 9")[0] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["nope.py"], "nope.py: there is no such script"),
        (["--ps", "1", "job.py"], "--ps: parameter servers need workers; add --workers N"),
        (["--jax", "--workers", "2", "--ps", "1", "job.py"], "--jax: JAX has workers only; leave out --ps"),
        (["--wokers", "2", "job.py"], "No such option"),
        (["--backoff", "nan", "job.py"], "'--backoff': nan is not a finite number of seconds."),
        (["--stall-timeout", "inf", "job.py"], "'--stall-timeout': inf is not a finite number of seconds."),
        (["--backoff", "-inf", "job.py"], "'--backoff': -inf is not in the range x>=0."),
        (["--name", "a/b", "job.py"], "--name: got 'a/b'"),
    ],
)
def test_bad_usage(runner: Runner, words: list[str], message: str) -> None:
    runner.script("")
    (runner.directory / "runs").mkdir()
    code, out, err = runner(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not list((runner.directory / "runs").iterdir())
