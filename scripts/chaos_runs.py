"""Starts and watches the runs that chaos.py disturbs, and reads their results."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from distlaunch.base.event_files import read_events
from distlaunch.base.events import Event
from distlaunch.base.run_dir import RunDir
from distlaunch.checkpoints.store import CheckpointStore

STRATEGIES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "one_device": ({}, ("worker:0",)),
    "mirrored": ({"strategy": "{kind: mirrored, replicas: 2}"}, ("worker:0",)),
    "multi_worker_mirrored": (
        {"strategy": "{kind: multi_worker_mirrored}", "cluster.workers": 2},
        ("worker:0", "worker:1"),
    ),
    "parameter_server": (
        {"strategy": "{kind: parameter_server}", "cluster.workers": 2, "cluster.ps": 1},
        ("chief:0", "worker:0", "worker:1", "ps:0"),
    ),
    "dtensor": ({"strategy": "{kind: dtensor, mesh: {batch: 2}}"}, ("worker:0",)),
    "jax": ({"strategy": "{kind: jax, mesh: {batch: 2}}"}, ("worker:0",)),
    "dtensor_2": (
        {"strategy": "{kind: dtensor, mesh: {batch: 2}}", "cluster.workers": 2},
        ("worker:0", "worker:1"),
    ),
    "jax_2": ({"strategy": "{kind: jax, mesh: {batch: 2}}", "cluster.workers": 2}, ("worker:0", "worker:1")),
}
EPOCHS, STEPS_PER_EPOCH, SAVE_STEPS = 6, 40, 15
STATE = "*.safetensors"
"""Name pattern of the files with a state: one file, or one for each process."""
STALL_S = 15.0
LIMIT_S = 300.0

CONFIG = """\
model: {{function: "{job}:model"}}
data: {{function: "{job}:data", global_batch: 16}}
compile: {{optimizer: {{name: SGD, args: {{learning_rate: 0.01, momentum: 0.9}}}}, loss: mse}}
train:
  epochs: {epochs}
  log_every_steps: 1
  callbacks: [{{name: "{job}:Sabotage", args: {{folder: "{orders}"}}, tasks: all}}]
determinism: true
checkpoint: {{every_steps: {save_steps}}}
cluster: {{stall_timeout_s: {stall_s}, stop_timeout_s: 20, start_timeout_s: 200}}
"""


class Launch:
    """A watched `distlaunch train`: the lines of its output with their times."""

    def __init__(self, work: Path, *words: str) -> None:
        temporary = work / "tmp"
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        environment.pop("TF_CONFIG", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distlaunch", "train", *words, "--json"],
            cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.said: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append((time.time(), line.rstrip()))

    def wait(self) -> int:
        """Return the exit code. Raise subprocess.TimeoutExpired after the timeout."""
        code = self.process.wait(LIMIT_S)
        self._reader.join()
        return code

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.said)


def options(strategy: str) -> list[str]:
    """Return the overrides that select a strategy."""
    return [word for key, value in STRATEGIES[strategy][0].items() for word in ("--set", f"{key}={value}")]


def write_config(work: Path) -> None:
    (work / "orders").mkdir(parents=True)
    job = Path(__file__).with_name("chaos_job.py")
    orders = work / "orders"
    text = CONFIG.format(job=job, epochs=EPOCHS, orders=orders, stall_s=STALL_S, save_steps=SAVE_STEPS)
    (work / "job.yaml").write_text(text)


def undisturbed(strategy: str, work: Path) -> Path:
    """Return the last checkpoint of an undisturbed run. Raise RuntimeError if the run fails."""
    write_config(work)
    launch = Launch(work, "job.yaml", *options(strategy))
    if launch.wait() != 0:
        raise RuntimeError(f"{strategy}, undisturbed: {launch.text}")
    return final_state(RunDir(work / "runs" / "job"))


def checkpoints(run: RunDir) -> list[Path]:
    return sorted(run.checkpoints.glob("step-*"))


def final_state(run: RunDir) -> Path:
    return checkpoints(run)[-1]


def differences(expected: Path, got: Path) -> list[str]:
    """Return the arrays that differ in any bit, without metrics, which start again when a run is resumed."""
    one, other = (
        {n: v for n, v in _read(path).items() if not n.startswith(("metric/", "log/"))} for path in (expected, got)
    )
    names = [f"{name}: {'missing' if name not in other else 'too much'}" for name in one.keys() ^ other.keys()]
    return names + [f"{n}: other values" for n in one.keys() & other.keys() if one[n].tobytes() != other[n].tobytes()]


def _read(path: Path) -> dict[str, np.ndarray]:
    return CheckpointStore(path.parent).load(int(path.name.removeprefix("step-"))).state


def processes_of(work: Path) -> list[int]:
    """Return the processes that were started for a trial, recognized by its folder for temporary files."""
    mark, found = str(work / "tmp"), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone, or another user's
            if process.environ().get("TMPDIR") == mark:
                found.append(process.pid)
    return found


def crowd() -> float:
    """Return the number of processes per core that want to run, since everything takes longer on a busy machine."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def events_of(run: RunDir, kind: type[Event]) -> list:
    """Return the run's own events of a kind."""
    return [event for event in read_events(run.events) if isinstance(event, kind)]
