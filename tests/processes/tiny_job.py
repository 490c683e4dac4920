"""A job of four steps in a folder of its own, started as users start theirs: a fresh command, in any environment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import EpochEnded
from distlaunch.base.run_dir import RunDir

LIMIT_S = 120.0
MODULE = """
import keras
import numpy as np


def model():
    layers = [keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.set_weights([np.full(each.shape, 0.1, "float32") for each in model.weights])
    model.compile("sgd", "mse")
    return model


def data():
    x = (np.arange(128, dtype="float32").reshape(32, 4) % 7) / 7
    return x, x.sum(1, keepdims=True)
"""
LOSSES = [2.4889, 2.2611]
"""Of `model.fit`, which test_proxies.py checks."""
_UNSET = ("TF_CONFIG", "KERAS_BACKEND", "KERAS_HOME", "FORCE_COLOR", "PYTHONPATH", "PYTHONSAFEPATH")
_ENTRY = "from distlaunch.cli.main import main; main()"


class Ended(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def write_job(folder: Path, module: str = MODULE, name: str = "mine.py", **sections: Any) -> Path:
    """Write a config and its module; return the config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(module)
    config = {
        "model": {"function": f"{name}:model"},
        "data": {"function": f"{name}:data", "global_batch": 16, "shuffle": False},
        "train": {"epochs": 2},
        **sections,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def command() -> list[str]:
    """Return the `distlaunch` command that belongs to this interpreter."""
    script = Path(sys.executable).with_name("distlaunch")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-c", _ENTRY]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of these tests without what may change a run, and with these variables."""
    return {**{name: value for name, value in os.environ.items() if name not in _UNSET}, "COLUMNS": "400", **variables}


def run_command(
    *words: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    start: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
) -> Ended:
    """Run `distlaunch` with these words. Nothing that it started is left; raises TimeoutExpired after the limit.

    Args:
        env: variables beside those of `environment()`.
        start: the command, instead of that of `command()`.
    """
    process = subprocess.Popen(
        [*(command() if start is None else start), *map(str, words)], cwd=cwd, env=environment(**(env or {})),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        kill_all(process.pid)
    return Ended(process.wait(), out, err)


def kill_all(pid: int) -> None:
    """Kill a process and everything below it, if any is left."""
    try:
        top = psutil.Process(pid)
        below = [*top.children(recursive=True), top]
    except psutil.NoSuchProcess:
        return
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def losses(folder: Path, name: str = "job") -> list[float]:
    """Return the loss of each epoch of a run."""
    run = RunDir(folder / "runs" / name)
    return [round(float(event.logs["loss"]), 4) for event in read_events_of(run.events, EpochEnded)]


def error_of(folder: Path, name: str = "job", task: str = "worker:0") -> dict[str, Any]:
    """Return what a task of the first attempt has reported of its failure."""
    return json.loads(RunDir(folder / "runs" / name).task(0, task).error_json.read_text())
