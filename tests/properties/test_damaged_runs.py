"""A run whose files are damaged, or somebody else's: each command says one sentence, and never a traceback."""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import click
import pytest
from click.testing import CliRunner

from distlaunch.base import events as ev
from distlaunch.base.errors import DistlaunchError
from distlaunch.base.event_files import EventWriter
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import Submission
from distlaunch.base.run_files.task_error import write_exception
from distlaunch.cli.main import cli
from distlaunch.config.read.load import dump_config, load_config
from tests.properties.test_damaged_checkpoints import corrupt

CONFIG = """\
model: {function: "m.py:model", args: {token: "${MY_TOKEN}", width: 3}}
data: {function: "m.py:data", global_batch: 4}
compile: {optimizer: {name: adam, args: {learning_rate: 1e-3}}, loss: mse, metrics: [mae]}
train: {epochs: 2, callbacks: [{name: TerminateOnNaN}, {name: CSVLogger, args: {filename: "${run_dir}/log.csv"}}]}
cluster: {workers: 2}
strategy: {kind: multi_worker_mirrored}
"""
_LIMIT_S, _MOST_BYTES = 60, 500_000_000

COMMANDS = {
    "events.jsonl": [("runs",), ("report", "RUN"), ("logs", "RUN"), ("plan", "job.yaml", "--resume", "--no-variables"),
                     ("runs", "--json"), ("report", "RUN", "--json"), ("plan", "RUN", "--resume", "--no-variables")],
    "run.json": [("runs",), ("plan", "job.yaml", "--resume", "--no-variables"), ("report", "RUN")],
    "job.json": [("runs",), ("report", "RUN"), ("runs", "--json")],
    "plan.json": [("runs",), ("report", "RUN"), ("logs", "RUN"), ("report", "RUN", "--json")],
    "environment.json": [("plan", "RUN", "--resume", "--no-variables"), ("report", "RUN")],
    "config.yaml": [("plan", "RUN", "--resume", "--no-variables"), ("plan", "job.yaml", "--resume", "--no-variables"),
                    ("report", "RUN"), ("runs",), ("plan", "RUN", "--resume", "--no-variables", "--set", "seed=3")],
    "attempts/0/config.yaml": [("plan", "job.yaml", "--resume", "--no-variables"), ("report", "RUN")],
    "attempts/0/plan.json": [("report", "RUN"), ("logs", "RUN"), ("runs",)],
    "attempts/0/worker-1/error.json": [("report", "RUN"), ("runs",), ("logs", "RUN")],
    "attempts/0/worker-1/events.jsonl": [("report", "RUN"), ("logs", "RUN"), ("runs",)],
    ".secrets": [("plan", "RUN", "--resume", "--no-variables"), ("plan", "job.yaml", "--resume", "--no-variables")],
    ".lock": [("runs",), ("plan", "RUN", "--resume", "--no-variables"), ("report", "RUN")],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that has failed in its second epoch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "m.py").write_text("def model(token, width): ...\ndef data(): ...\n")
    (tmp_path / "job.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "job.yaml", (), {"MY_TOKEN": "tok-1234567"}).config
    made = RunDir.claim("runs", "job")
    made.config.write_text(dump_config(config))
    made.keep_secrets(config.secrets.variables)
    made.write_submission(Submission("slurm", "4711", 1.7e9, "gpu"))
    tasks = [
        {"task": f"worker:{number}", "address": f"127.0.0.1:500{number}", "argv": ["python"], "env": {"A": "1"},
         "logs": str(made.task(0, f"worker:{number}").path)}
        for number in range(2)
    ]  # fmt: skip
    plan = {"run_dir": str(made.path), "attempt": 0, "mode": "train", "engine": "local", "chief": "worker:0",
            "start_timeout_s": 300, "stop_timeout_s": 30, "stall_timeout_s": None, "tasks": tasks}  # fmt: skip
    environment = {"config_folder": str(tmp_path), "directory": str(tmp_path), "run_dir": str(made.path)}
    for path, data in ((made.plan, plan), (made.attempt_plan(0), plan), (made.environment, environment)):
        made.write_json(path, data)
    made.attempt_config(0).write_text(dump_config(config))
    _write_events(made)
    (made.path / ".lock").write_text("4711 elsewhere")
    try:
        raise ValueError("no number")
    except ValueError as error:
        write_exception(made.task(0, "worker:1"), error, step=4)
    for number in range(2):
        files = made.task(0, f"worker:{number}")
        files.path.mkdir(exist_ok=True)
        files.stdout_log.write_text("begun\nended\n")
    return made


def _write_events(run: RunDir) -> None:
    chief = EventWriter(run.events, attempt=0, task="worker:0")
    variables = [
        {"name": "dense/kernel", "shape": [3, 4], "dtype": "float32", "parts": [{"task": "ps:0", "bytes": 48}]}
    ]
    parts = [
        {"task": f"device:{number}", "bytes": 24, "bounds": [[0, 3], [2 * number, 2 * number + 2]]} for number in (0, 1)
    ]
    on_mesh = [{"name": "dense/kernel", "shape": [3, 4], "dtype": "float32", "layout": [None, "model"], "parts": parts}]
    mesh = {"axes": ["batch", "model"], "shape": [1, 2], "devices": [0, 1], "inputs": ["batch"]}
    for event in (
        ev.TaskStarted(host="here", pid=1),
        ev.DataResolved(name="data", source="m.py:data", examples={"train": 64, "validation": None}, seen={"a": "{}"}),
        ev.TrainingStarted(strategy="multi_worker_mirrored", loop="fit", replicas=2, tasks=2, global_batch=4, epochs=2,
                           first_epoch=0, first_step=0, steps_per_epoch=4, parameters=10, optimizer="Adam", loss="mse"),
        ev.VariablesPlaced(variables=variables),
        ev.VariablesPlaced(variables=on_mesh, mesh=mesh),
        ev.StepsDone(epoch=0, step=2, step_in_epoch=2, steps=2, seconds=0.5, logs={"loss": 0.5}),
        ev.EpochEnded(epoch=0, step=4, seconds=1.0, logs={"loss": 0.5, "val_loss": float("nan")}),
        ev.CheckpointSaved(step=4, path=str(run.checkpoints / "step-00000004"), num_bytes=100, seconds=0.1),
        ev.Evaluated(step=4, split="validation", logs={"loss": 0.25}),
        ev.StepsTimed(steps=4, seconds=1.0, examples=16, input_s=0.5, step_median_s=0.1, step_p99_s=0.2, cpu_s=1.0,
                      cores=2),
        ev.Notice(level="warning", message="a notice"),
        ev.TaskFailed(failed_task="worker:1", host="here", reason="ValueError: no number", log="x.log"),
        ev.RunEnded(status="failed", step=4, epochs_done=1, seconds=2.0, logs={"loss": 0.5}),
    ):  # fmt: skip
        chief.write(event)
    chief.close()
    other = EventWriter(run.task(0, "worker:1").events, attempt=0, task="worker:1")
    other.write(ev.TaskStarted(host="here", pid=2))
    other.write(ev.ExampleSkipped(example="example 3", reason="no number"))
    other.close()


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer within {_LIMIT_S} s")


@pytest.fixture
def limited() -> Iterator[None]:
    """A limit of time for each command, and of memory for all."""
    before = signal.signal(signal.SIGALRM, _too_long)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) * 1024 < _MOST_BYTES


def check(words: tuple[str, ...]) -> None:
    """Run a command, which may only end as users know it."""
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    result = CliRunner().invoke(cli, [word.replace("RUN", "runs/job") for word in words])
    signal.setitimer(signal.ITIMER_REAL, 0)
    error = result.exception
    if isinstance(error, OSError):
        # `main` makes one sentence of it
        assert error.strerror, words
    elif not isinstance(error, SystemExit | DistlaunchError | click.ClickException | None):
        raise AssertionError(f"{words}: {error!r}") from error
    assert "Traceback" not in result.output or "no number" in result.output
    assert not any(character in result.output for character in "\x1b\x07\x08\x9b"), words


def _mutate(data: bytes, draw: random.Random) -> bytes:
    """Damage a file, or put other values into well-formed JSON."""
    if draw.random() < 0.5:
        return corrupt(data, draw)
    lines = data.split(b"\n")
    number = draw.randrange(len(lines))
    try:
        value = json.loads(data if data.startswith(b"{\n") else lines[number])
    except ValueError:
        return corrupt(data, draw)
    forged = json.dumps(_forged(value, draw)).encode()
    if data.startswith(b"{\n"):
        return forged
    return b"\n".join([*lines[:number], forged, *lines[number + 1 :]])


_VALUES = (None, True, -1, 0, 10**18, 10**400, 1.5, "x", "", "nan", "\x1b]0;title\x07", "../../etc", "é" * 5000, [], {},
           [[1]], {"a": {"b": 1}}, "\ud800", float("nan"))  # fmt: skip


def _forged(value: object, draw: random.Random) -> object:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        return {**value, key: _forged(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], _forged(value[at], draw), *value[at + 1 :]]
    return draw.choice(_VALUES)


def check_damages(run: RunDir, number: int, names: Callable[[int], str], seed: int) -> None:
    draw = random.Random(seed)
    originals = {name: (run.path / name).read_bytes() for name in COMMANDS}
    for index in range(number):
        name = names(index)
        path, before = run.path / name, originals[name]
        path.write_bytes(_mutate(before, draw))
        words = draw.choice(COMMANDS[name])
        try:
            check(words)
        except BaseException:
            print(f"{name}: {path.read_bytes()[:2000]!r}")
            raise
        path.write_bytes(before)


@pytest.mark.usefixtures("limited")
def test_commands_on_a_healthy_run(run: RunDir) -> None:
    for words in {words for each in COMMANDS.values() for words in each}:
        check(words)
    result = CliRunner().invoke(cli, ["plan", "job.yaml", "--resume", "--no-variables"])
    assert result.exit_code == 0, result.output
    assert "resuming runs/job" in result.output


@pytest.mark.usefixtures("limited")
def test_damaged_files_of_a_run(run: RunDir) -> None:
    names = list(COMMANDS)
    check_damages(run, 200, lambda index: names[index % len(names)], seed=7)


@pytest.mark.slow
@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("name", COMMANDS)
def test_many_damaged_files_of_a_run(run: RunDir, name: str) -> None:
    check_damages(run, 1000, lambda index: name, seed=11)
