"""Tasks that are forked from a process that has imported what they need are like fresh ones, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from supervised import REPOSITORY, wait_until

from distlaunch.agent.host import HostTask, HostTasks
from distlaunch.agent.messages import Exit, Order, Preload, TaskSpec
from distlaunch.agent.warm_process import PADDING
from distlaunch.agent.warm_starts import WarmStarts
from distlaunch.base.protocol import SAFE_MODULE
from distlaunch.base.socket_messages import receive_message, send_message

PRELOAD = """
import os, pathlib, random, threading
MARK = os.urandom(8).hex()  # the same in all that is forked from one process

def main(arguments):
    here = pathlib.Path(__file__).parent
    with open(here / "imports", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if "raises" in arguments:
        raise RuntimeError("no such device")
    if "thread" in arguments:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return "importing has started a thread"
    if "waits" in arguments:
        os.read(os.open(here / "fifo", os.O_RDONLY), 1)
    return ""
"""
FACTS = (Path(__file__).parent / "user_code" / "warm_starts.py").read_text()
WAITS = """
import signal, sys, time
print("up", flush=True)
signal.pause()
"""
LIMIT_S = 30.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"preload": PRELOAD, "facts": FACTS, "waits": WAITS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pool() -> Iterator[WarmStarts]:
    with WarmStarts().kept() as pool:
        yield pool


class Lines(list[tuple[str, str]]):
    def __call__(self, task: str, line: str) -> None:
        self.append((task, line))


def spec(folder: Path, module: str, *arguments: str, name: str = "worker:0", **env: str) -> TaskSpec:
    given = {**os.environ, "PYTHONPATH": os.pathsep.join((REPOSITORY, str(folder))), "CODE": "0", **env}
    argv = (sys.executable, *SAFE_MODULE, module, name)
    logs = folder / f"{name}.out", folder / f"{name}.err"
    late = ("CODE", "OWN", "TMPDIR")
    return TaskSpec(name, argv, given, *logs, folder / "heartbeat", Preload("preload", arguments, late))


def fresh(made: TaskSpec) -> TaskSpec:
    return TaskSpec(made.name, made.argv, made.env, made.stdout_log, made.stderr_log, made.heartbeat)


def ends(tasks: HostTasks, *waited: HostTask) -> list[Exit]:
    until(tasks, lambda: all(task.poll() is not None for task in waited))
    return [end for task in waited if (end := task.poll()) is not None]


def until(tasks: HostTasks, condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at, "not within the time"
        tasks.wait(0.02)


def facts(made: TaskSpec) -> dict:
    return json.loads(made.stdout_log.read_text().splitlines()[-1])


def num_imports(folder: Path) -> int:
    return len((folder / "imports").read_text().split())


def test_is_like_a_fresh_process(folder: Path, pool: WarmStarts) -> None:
    """Everything that a program can ask about itself, asked in a fresh process and in a forked one."""
    (folder / "elsewhere").mkdir()
    given = {"CODE": "7", "OWN": "a\nb \udcff", "TMPDIR": str(folder / "elsewhere")}
    cold = fresh(spec(folder, "facts", name="cold", **given))
    first, second = (spec(folder, "facts", name=f"warm:{index}", **given) for index in range(2))
    lines = Lines()
    with HostTasks(lines, time.monotonic, pool) as tasks:
        assert [end.code for end in ends(tasks, *map(tasks.start, (cold, first, second)))] == [7, 7, 7]
    of_cold, *of_warm = map(facts, (cold, first, second))
    assert of_warm[0]["mark"] == of_warm[1]["mark"] != of_cold["mark"]
    assert of_warm[0]["random"] != of_warm[1]["random"]
    for told, name in zip(of_warm, ("warm:0", "warm:1"), strict=True):
        assert told["parent"] == os.getpid()
        for own in ("mark", "random"):
            del told[own]
        told["env"].pop("DISTLAUNCH_LIFELINE_FD")
        expected = {key: value for key, value in of_cold.items() if key in told}
        expected["env"] = {key: value for key, value in of_cold["env"].items() if key != "DISTLAUNCH_LIFELINE_FD"}
        expected |= {key: [name if word == "cold" else word for word in of_cold[key]]
                     for key in ("argv", "orig_argv", "cmdline")}  # fmt: skip
        assert told == expected
    assert ("warm:1", "to the other") in lines
    assert second.stderr_log.read_text() == "to the other\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_tasks_run_on_the_cores_that_they_are_given(folder: Path, pool: WarmStarts) -> None:
    one = frozenset({max(os.sched_getaffinity(0))})
    warm = spec(folder, "waits", name="warm")._replace(cores=one)
    cold = fresh(warm._replace(name="cold"))._replace(cores=one)
    free = spec(folder, "waits", name="free")
    lines = Lines()
    with HostTasks(lines, time.monotonic, pool) as tasks:
        started = [tasks.start(each) for each in (warm, cold, free)]
        until(tasks, lambda: len([line for _, line in lines if line == "up"]) == 3)
        assert [os.sched_getaffinity(task.pid) for task in started] == [one, one, os.sched_getaffinity(0)]


def test_later_attempts_need_no_import(folder: Path, pool: WarmStarts) -> None:
    for attempt in range(3):
        with HostTasks(Lines(), time.monotonic, pool) as tasks:
            started = [tasks.start(spec(folder, "facts", name=f"{attempt}:{index}")) for index in range(2)]
            assert [end.code for end in ends(tasks, *started)] == [0, 0]
    assert num_imports(folder) == 1


@pytest.mark.parametrize("change", [{"OWN": "2"}, {"OTHER": "2"}], ids=["read late", "read by an import"])
def test_fits_by_the_environment_that_imports_read(folder: Path, pool: WarmStarts, change: dict[str, str]) -> None:
    with HostTasks(Lines(), time.monotonic, pool) as tasks:
        ends(tasks, tasks.start(spec(folder, "facts", OWN="1", OTHER="1")))
        made = spec(folder, "facts", **{"OWN": "1", "OTHER": "1", **change})
        ends(tasks, tasks.start(made))
    assert num_imports(folder) == (1 if "OWN" in change else 2)
    assert facts(made)["env"].items() >= change.items()


@pytest.mark.parametrize("why", ["raises", "thread"])
def test_starts_fresh_where_a_fork_is_not_safe(folder: Path, pool: WarmStarts, why: str) -> None:
    with HostTasks(Lines(), time.monotonic, pool) as tasks:
        made = [spec(folder, "facts", why, name=str(index)) for index in range(2)]
        assert [end.code for end in ends(tasks, *map(tasks.start, made))] == [0, 0]
    assert facts(made[0])["mark"] != facts(made[1])["mark"]
    assert num_imports(folder) == 1, "it is not tried again"


def test_packages_that_change_are_imported_anew(folder: Path, pool: WarmStarts) -> None:
    with HostTasks(Lines(), time.monotonic, pool) as tasks:
        ends(tasks, tasks.start(spec(folder, "facts")))
        (folder / "new").write_text(PRELOAD)
        (folder / "new").replace(folder / "preload.py")
        for _ in range(2):
            assert ends(tasks, tasks.start(spec(folder, "facts")))[0].code == 0
    assert num_imports(folder) == 2


def test_a_killed_warm_process_costs_no_task(folder: Path, pool: WarmStarts) -> None:
    with HostTasks(Lines(), time.monotonic, pool) as tasks:
        lines = [tasks.start(spec(folder, "waits", name=str(index))) for index in range(2)]
        until(tasks, lambda: all(task.pid for task in lines))
        os.kill(int((folder / "imports").read_text()), signal.SIGKILL)
        more = spec(folder, "facts", name="more")
        assert ends(tasks, tasks.start(more))[0].code == 0
        assert ends(tasks, tasks.start(spec(folder, "facts", name="again")))[0].code == 0
        assert all(task.poll() is None for task in lines), "those it had started go on"
        assert num_imports(folder) == 2


@pytest.mark.parametrize(("order", "code"), [(Order.STOP, -signal.SIGTERM), (Order.KILL, -signal.SIGKILL)])
def test_stopped_while_the_imports_run(folder: Path, pool: WarmStarts, order: Order, code: int) -> None:
    os.mkfifo(folder / "fifo")
    with HostTasks(Lines(), time.monotonic, pool) as tasks:
        stopped, other = (tasks.start(spec(folder, "facts", "waits", name=str(index))) for index in range(2))
        assert (stopped.pid, stopped.poll()) == (0, None)
        stopped.send(Order.DUMP, whole_group=False)
        stopped.send(order, whole_group=False)
        assert ends(tasks, stopped)[0].code == code
        (folder / "fifo").write_text("+")
        assert ends(tasks, other)[0].code == 0
    assert not (folder / "0.out").exists()


def test_nothing_is_left(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    with WarmStarts().kept() as pool, HostTasks(Lines(), time.monotonic, pool) as tasks:
        waiting = tasks.start(spec(folder, "waits"))
        until(tasks, lambda: waiting.pid)
        tasks.start(spec(folder, "facts", "waits", name="importing"))
        wait_until(lambda: num_imports(folder) == 2)
        pids = [waiting.pid, *map(int, (folder / "imports").read_text().split())]
        assert len(pids) == 3
    assert not any(map(psutil.pid_exists, pids))


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_warm_starts import HostTasks, WarmStarts, Lines, spec, until
folder = Path({folder!r})
with WarmStarts().kept() as pool, HostTasks(Lines(), time.monotonic, pool) as tasks:
    task = tasks.start(spec(folder, "waits"))
    until(tasks, lambda: task.pid)
    print(task.pid, flush=True)
    time.sleep(600)
"""


def test_ends_with_a_killed_launcher(folder: Path) -> None:
    code = LAUNCHER.format(tests=str(Path(__file__).parent), folder=str(folder))
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()), int((folder / "imports").read_text())]
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


NOTHING_MADE = """
import os, sys
from distlaunch.tasks import preload
unfit = preload.main(sys.argv[1:])
assert ("jax" in sys.modules) == (sys.argv[1] == "jax"), "JAX takes half a second"
assert ("tensorflow" in sys.modules) == (sys.argv[-1] == "tensorflow"), "tasks on JAX may not need it"
import jax, keras
from jax._src import xla_bridge
from tensorflow.python.eager import context
assert unfit == "", unfit
assert keras.backend.backend() == sys.argv[1]
assert context.context_safe() is None, "TensorFlow has begun"
assert not xla_bridge._backends, "JAX has begun"
assert "grpc" not in sys.modules
import numpy
numpy.random.seed(0)
if (child := os.fork()) == 0:
    os._exit(int(numpy.random.randint(1, 1 << 30) == numpy.random.RandomState(0).randint(1, 1 << 30)))
assert os.waitpid(child, 0)[1] == 0, "a fork draws what its parent draws"
"""


@pytest.mark.parametrize(
    "words",
    [
        ("tensorflow",),
        pytest.param(("jax",), marks=pytest.mark.slow),
        pytest.param(("jax", "tensorflow"), marks=pytest.mark.slow),
    ],
)
def test_imports_of_a_backend_create_nothing(words: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", NOTHING_MADE, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_task_that_nobody_knows_of_ends_at_its_gate(folder: Path) -> None:
    """Its launcher was killed, say, before it had its number: it does nothing that counts, and does not stay."""
    ours, theirs = socket.socketpair()
    words = [str(theirs.fileno()), "preload", PADDING]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((REPOSITORY, str(folder)))}
    argv = [sys.executable, *SAFE_MODULE, "distlaunch.agent.warm_process", *words]
    process = subprocess.Popen(argv, env=env, pass_fds=(theirs.fileno(),))
    theirs.close()
    with ours, open(os.devnull, "r+b") as nothing:
        assert json.loads(receive_message(ours)[0]) == {"unfit": ""}
        read, write = os.pipe()
        made = fresh(spec(folder, "leaves_a_mark"))
        (folder / "leaves_a_mark.py").write_text("open('mark', 'w').close()")
        asked = {"argv": made.argv, "env": env, "cwd": str(folder), "lifeline": "LIFELINE"}
        send_message(ours, json.dumps(asked).encode(), [nothing.fileno()] * 3 + [read])
        task = json.loads(receive_message(ours)[0])["pid"]
        os.close(read)
        assert psutil.pid_exists(task), "it waits"
        os.close(write)
        wait_until(lambda: not psutil.pid_exists(task) or psutil.Process(task).status() == psutil.STATUS_ZOMBIE)
    process.wait(10)
    assert not (folder / "mark").exists()
