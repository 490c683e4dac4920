"""A task that behaves as told, instead of a worker: `child.py RUN_DIR TASK ACTION [ACTION...]`, one after the other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import Evaluated, RunEnded, StepsDone, TaskStarted, TrainingStarted
from distlaunch.base.protocol import LIFELINE_FD
from distlaunch.base.run_dir import RunDir
from distlaunch.base.signals import DUMP_SIGNAL

RUN, TASK = RunDir(sys.argv[1]), sys.argv[2]
LEAD = os.environ.get("LEAD", "worker:0") == TASK
WRITER = EventWriter(RUN.events if LEAD else RUN.task(0, TASK).events, attempt=0, task=TASK)


def mark(name: str) -> None:
    (RUN.path / name).write_text(str(os.getpid()))


def wait_for(name: str) -> None:
    until = time.monotonic() + 30
    while not (RUN.path / name).exists():
        if time.monotonic() > until:
            os._exit(99)
        time.sleep(0.005)


def come() -> None:
    WRITER.write(TaskStarted(host="host-" + TASK[-1], pid=os.getpid()))


def train() -> None:
    come()
    WRITER.write(
        TrainingStarted(strategy="fake", loop="fit", replicas=2, tasks=2, global_batch=8, epochs=2, first_epoch=0,
                        first_step=0, steps_per_epoch=4, parameters=10)
    )  # fmt: skip
    WRITER.write(StepsDone(epoch=0, step=3, step_in_epoch=3, steps=3, seconds=0.1, logs={"loss": 0.5}))
    mark(f"training-{TASK[-1]}")


def pulse(step: str) -> None:
    from distlaunch.base.heartbeat import Heartbeat

    Heartbeat(RUN.task(0, TASK).heartbeat).at_step(int(step))


def finish(status: str = "done") -> None:
    WRITER.write(RunEnded(status=status, step=8, epochs_done=2, seconds=1.0, logs={"loss": 0.25}))


def error(kind: str, message: str = "no") -> None:
    trace = f"Traceback (most recent call last):\n  File 'x.py', line 1\n{kind}: {message}"
    data = {
        "kind": "exception",
        "type": kind,
        "message": message,
        "traceback": trace,
        "host": "far",
        "user_error": False,
    }
    RUN.task(0, TASK).error_json.write_text(json.dumps(data))


def config_error(key: str, message: str) -> None:
    problems = [{"key": key.split("."), "message": message}]
    RUN.task(0, TASK).error_json.write_text(json.dumps({"kind": "config", "problems": problems}))


def hang() -> None:
    mark(f"hanging-{TASK[-1]}")
    while True:
        time.sleep(60)


def stop_cleanly() -> None:
    """Wait for SIGTERM, and then stop like a worker."""

    def stop(*_: object) -> None:
        finish("stopped")
        mark(f"stopped-{TASK[-1]}")
        os._exit(4)

    signal.signal(signal.SIGTERM, stop)
    train()
    hang()


def serve() -> None:
    """Until SIGTERM comes, as a server does. Tells by a file which of its processes this is, and when it has ended."""

    def end(*_: object) -> None:
        mark(f"ended-{TASK}")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    come()
    number = len(list(RUN.path.glob(f"serving-{TASK}-*"))) + 1
    (RUN.path / f".{TASK}").write_text(str(os.getpid()))
    (RUN.path / f".{TASK}").rename(RUN.path / f"serving-{TASK}-{number}")
    while True:
        time.sleep(60)


def wait_gone(name: str) -> None:
    """Wait until the process that left this mark has ended."""
    wait_for(name)
    stat = Path(f"/proc/{(RUN.path / name).read_text()}/stat")
    until = time.monotonic() + 30
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > until:
            os._exit(99)
        time.sleep(0.005)


def evaluate(step: str) -> None:
    WRITER.write(Evaluated(step=int(step), split="validation", logs={"loss": 0.5}))


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def handle_dump() -> None:
    import faulthandler

    faulthandler.register(DUMP_SIGNAL)


def fork_stubborn() -> None:
    """A grandchild that ignores SIGTERM and holds the pipes."""
    code = (
        "import signal,time,sys; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w').write('x'); time.sleep(300)"
    )
    subprocess.Popen([sys.executable, "-c", code, str(RUN.path / "grandchild")])
    wait_for("grandchild")


def flood(megabytes: str) -> None:
    """At least so many, and on until there is the mark `trained`; how many bytes it was is in the file `flooded`."""
    lines = (b"x" * 99 + b"\n") * 10_000
    written = 0
    while written < int(megabytes) * len(lines) or not (RUN.path / "trained").exists():
        written += sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()
    (RUN.path / "flooded").write_text(str(written))


def say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text.encode().decode("unicode_escape") + end)
    sys.stdout.flush()


def say_error(text: str) -> None:
    sys.stderr.write(text + "\n")


def close_stdout() -> None:
    os.close(1)


def honour_lifeline() -> None:
    import threading

    fd = int(os.environ[LIFELINE_FD])

    def wait() -> None:
        os.read(fd, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def quiet_exit(code: str = "0") -> None:
    sys.stdout.flush() if not sys.stdout.closed else None
    os._exit(int(code))


def die(number: str = "9") -> None:
    os.kill(os.getpid(), int(number))


if __name__ == "__main__":
    Path(RUN.task(0, TASK).path).mkdir(parents=True, exist_ok=True)
    for action in sys.argv[3:]:
        name, *arguments = action.split("=")
        globals()[name](*arguments)
