"""Trackers get each value once, and their failures are warnings. tests/trackers has the real packages."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from distlaunch.base.event_files import read_events
from distlaunch.base.events import EpochEnded, RunEnded, StepsDone, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from distlaunch.config.checks.machine import missing_trackers
from distlaunch.config.run import TrackerName
from distlaunch.jobs.tracking import tracking
from distlaunch.runs.tracking.mlflow_names import accepted_name
from tests.recorded_run import START, done, ended, make_run, record, timed

CONFIG = """
model: {function: mine.py:model}
data: {function: mine.py:data, global_batch: 32}
train: {epochs: 7, steps_per_epoch: null}
compile: {optimizer: {name: sgd, args: {learning_rate: 0.001, nesterov: true}}, loss: mse}
tracking: [wandb]
"""
ROWS = 23 + 3
"""Values of steps and of epochs in the run."""
STAND_IN = """
import json, os, sys, time

def write(*lines):
    with open(os.environ["SENT"], "a") as file:
        file.writelines(json.dumps(line) + "\\n" for line in lines)

class Run:
    # like the real package, `log` only queues rows, and `finish` stores them
    def __init__(self, id):
        self.id, self.queued = id, []
        with open(os.environ["SENT"]) as file:
            stored = [row for row in map(json.loads, file) if row["id"] == id and "row" in row]
        self.starting_step = 1 + max((row["row"] for row in stored), default=-1)
    def define_metric(self, name, **options): pass
    def log(self, values, step): self.queued.append({"id": self.id, "row": step, **values})
    def finish(self, exit_code):
        if os.environ.get("HOW") == "is slow":
            write(*self.queued[:10])
            open("uploading", "w").close()
            time.sleep(1000)
        write(*self.queued, {"id": self.id, "ended": exit_code})

def init(*, id, config, name, **options):
    how = os.environ.get("HOW")
    if how == "fails":
        raise RuntimeError("the server is gone")
    if how == "hangs":
        time.sleep(1000)
    write({"id": id, "config": config, "name": name})
    return Run(id)
"""

MLFLOW = r"""
import collections, json, os, posixpath, re, sys, types

Metric = collections.namedtuple("Metric", "key value timestamp step")
Param = collections.namedtuple("Param", "key value")
sys.modules["mlflow.entities"] = sys.modules[__name__]
set_tracking_uri = lambda uri: None

def write(*lines):
    with open(os.environ["SENT"], "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)

def read(key):
    with open(os.environ["SENT"]) as file:
        return [line for line in map(json.loads, file) if key in line]

class MlflowClient:
    def get_experiment_by_name(self, name): return types.SimpleNamespace(experiment_id="0")
    def create_run(self, experiment, start_time, tags, run_name):
        write({"created": run_name, **tags})
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_name))
    def update_run(self, id, status): pass
    def set_terminated(self, id, status, end_time): write({"ended": status})
    def get_run(self, id):
        kept = {kind: {line[kind]: line["value"] for line in read(kind)} for kind in ("metric", "param")}
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=kept["metric"], params=kept["param"]))
    def get_metric_history(self, id, name):
        return [types.SimpleNamespace(step=line["step"]) for line in read("metric") if line["metric"] == name]
    def log_batch(self, id, metrics=(), params=()):
        if os.environ.get("HOW") == "is killed":
            os.kill(os.getpid(), 9)
        assert len(metrics) <= 1000 and len(params) <= 100
        for key in [each.key for each in (*metrics, *params)]:  # the rules of the real package
            if not re.match(r"^[/\w.\- :]*$", key) or posixpath.normpath(key) != key or key[0] in "./":
                raise ValueError(f"invalid name: {key}")
        write(*({"param": each.key, "value": each.value} for each in params))
        write(*({"metric": each.key, "value": each.value, "step": each.step} for each in metrics))
"""


def make_job(folder: Path) -> RunDir:
    """Write a run with a config, below the current directory."""
    (folder / "mine.py").write_text("def model(): ...\ndef data(): ...\n")
    run = make_run(RunDir("runs/job"))
    run.config.write_text(CONFIG)
    return run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    run = make_job(tmp_path)
    run.write_json(run.environment, {"git": {"commit": "abc123"}})
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    (tmp_path / "packages" / "mlflow.py").write_text(MLFLOW)
    return run


def environment(**more: str) -> dict[str, str]:
    paths = [str(Path("packages").absolute()), *filter(None, [os.environ.get("PYTHONPATH")]), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SENT": str(Path("sent").absolute()), **more}


def track(
    run: RunDir, ends_early: Callable[[], bool] = lambda: False, name: TrackerName = "wandb", **more: str
) -> list[str]:
    """Track a run that has ended, and return the warnings."""
    said: list[str] = []
    with tracking(run, [name], environment(**more), said.append, ends_early):
        pass
    return [line for line in said if name in line]


def sent() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("sent").read_text().splitlines()]


def test_a_run_is_sent_once_over_two_launchers(run: RunDir) -> None:
    assert track(run) == []
    opened, *rows, closed = sent()
    assert (opened["name"], opened["config"]["git_commit"]) == ("job", "abc123")
    assert closed["ended"] == 0
    # step 23 was sent before it was trained again
    assert [row["step"] for row in rows if "batch/loss" in row] == [*range(1, 21), 23, 25, 30]
    assert {row["step"]: row["val_loss"] for row in rows if "val_loss" in row} == {10: 16.0, 20: 12.0, 30: 6.0}
    assert rows[0]["batch/loss"] == 100.0
    start = TrainingStarted(**START, first_epoch=3, first_step=30)
    times = [event.time for event in read_events(run.events) if isinstance(event, (StepsDone, EpochEnded))]
    assert [row["_timestamp"] for row in rows] == times, "of the events, not of the time at which they are sent"
    more = RunEnded(status="failed", step=40, epochs_done=4, seconds=9.0)
    rated = replace(ended(3, 1.0), learning_rate=0.25)
    record(run.events, 2, "worker:0", start, done(35, 2.0), timed(5, 1.0, 320), done(40, 1.0), rated, more)
    assert track(run) == []
    again = sent()[len(rows) + 2 :]
    assert [row.get("step") for row in again] == [None, 35, 40, 40, None]
    numbers = [row["row"] for row in sent() if "row" in row]
    assert numbers == sorted(set(numbers)), "wandb ignores rows with a step that is not above its last one"
    assert {row["id"] for row in again} == {opened["id"]}
    assert again[-1]["ended"] == 1
    assert (again[2]["speed/examples_per_s"], again[2]["speed/memory_mb"]) == (320.0, pytest.approx(536.87, abs=0.01))
    assert again[3]["learning_rate"] == 0.25
    assert "speed/examples_per_s" not in again[1]
    assert track(run) == []
    assert len(sent()) == len(rows) + 2 + 5, "there was nothing new"


def test_config_values_keep_their_types_and_long_texts_are_shortened(run: RunDir) -> None:
    run.config.write_text(CONFIG.replace("mine.py:model}", f"mine.py:model, args: {{text: {'x' * 600}}}}}"))
    track(run)
    config: Any = sent()[0]["config"]
    assert (config["train.epochs"], config["train.steps_per_epoch"]) == (7, None)
    arguments = {name: config[f"compile.optimizer.args.{name}"] for name in ("learning_rate", "nesterov")}
    assert arguments == {"learning_rate": 0.001, "nesterov": True}
    assert config["model.args.text"] == "x" * 500


def test_a_run_that_could_not_start_leaves_no_directory(tmp_path: Path, run: RunDir) -> None:
    claimed = RunDir.claim(tmp_path / "other", "job")
    with tracking(claimed, ["wandb"], environment(), lambda message: None):
        pass
    claimed.discard()
    assert not claimed.path.exists()


def test_a_tracker_that_fails_is_a_warning_and_can_be_sent_later(run: RunDir) -> None:
    (warning,) = track(run, HOW="fails")
    assert "tracking: wandb failed: RuntimeError: the server is gone" in warning
    assert "`distlaunch track runs/job wandb` sends the rest" in warning
    assert track(run) == []
    assert len(sent()) == 2 + ROWS


def command(run: RunDir, monkeypatch: pytest.MonkeyPatch, *words: str, **more: str) -> str:
    """Return the output of `distlaunch track RUN`."""
    for name, value in environment(**more).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend("packages")
    result = CliRunner().invoke(cli, ["track", str(run.path), *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_values_that_were_only_queued_are_sent_later(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlaunch.jobs.tracking._DEADLINE_S", 600.0)
    (warning,) = track(run, Path("uploading").exists, HOW="is slow")
    assert "`distlaunch track runs/job wandb` sends the rest" in warning
    assert command(run, monkeypatch) == "sent to wandb\n"
    assert [row["row"] for row in sent() if "row" in row] == [*range(ROWS)]
    assert len({row["id"] for row in sent()}) == 1
    assert sent()[-1]["ended"] == 0
    assert command(run, monkeypatch) == "nothing new to send to wandb\n"


def test_another_target_gets_a_run_of_its_own(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert track(run) == []
    other = {"WANDB_PROJECT": "other", "WANDB_BASE_URL": "https://me:secret@host/?key=secret"}
    assert command(run, monkeypatch, **other) == "sent to wandb\n"
    first, second = dict.fromkeys(row["id"] for row in sent())
    assert [sum(row["id"] == id for row in sent()) for id in (first, second)] == [2 + ROWS, 2 + ROWS]
    assert command(run, monkeypatch, **other) == "nothing new to send to wandb\n"
    for name in other:
        monkeypatch.delenv(name)
    assert command(run, monkeypatch) == "nothing new to send to wandb\n"
    assert "secret" not in (run.path / "tracking" / "wandb.json").read_text(encoding="utf-8")


def test_the_end_of_a_run_is_sent_without_new_values(run: RunDir) -> None:
    assert track(run) == []
    start = TrainingStarted(**START, first_epoch=3, first_step=30)
    record(run.events, 2, "worker:0", start, RunEnded(status="failed", step=30, epochs_done=3, seconds=9.0))
    assert track(run) == []
    assert [line["ended"] for line in sent() if "ended" in line] == [0, 1]


LAYOUT = """
strategy: {kind: jax, layout: {"(query|key|value)/kernel": [model], ".*bias": [model], ".+bias": [model]}}
"""


def test_mlflow_gets_values_and_settings_of_any_name(run: RunDir) -> None:
    run.config.write_text(CONFIG + LAYOUT)
    logs = {"recall@10": 0.5, "recall_10": 0.25}
    record(run.events, 1, "worker:0", StepsDone(epoch=4, step=41, step_in_epoch=1, steps=1, seconds=1.0, logs=logs))
    assert track(run, name="mlflow") == []
    values = {line["metric"]: line["value"] for line in sent() if "recall" in line.get("metric", "")}
    assert values == {"batch/recall_10": 0.25, accepted_name("batch/recall@10"): 0.5}
    params = [line["param"] for line in sent() if "param" in line]
    assert len(set(params)) == len(params)
    keys = ("strategy.layout.(query|key|value)/kernel", "strategy.layout..*bias")
    assert {accepted_name(key) for key in keys} < set(params)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("val_f1 score:a-b/c.d", "val_f1 score:a-b/c.d"), ("größe", "größe"), ("a..b/c.", "a..b/c."),
        ("x" * 250, "x" * 250), ("acc(%)", "acc___[]"), ("a\nb", "a_b[]"), ("/a//b/", "_/a/_/b/_[]"),
        ("../a/.", "__/a/_[]"), ("..a", "__a[]"), ("", "_[]"), ("x" * 300, "x" * 241 + "[]"),
        ("x" * 240 + "/" + "x" * 20, "x" * 240 + "[]"),
    ],
)  # fmt: skip
def test_names_in_mlflow(name: str, accepted: str) -> None:
    """`[]` stands for a checksum."""
    assert re.sub(r"_[0-9a-f]{8}\Z", "[]", accepted_name(name)) == accepted


def test_names_in_mlflow_stay_different() -> None:
    names = ["a@b", "a_b", "a(b", "x" * 300, "x" * 301]
    assert len({accepted_name(name) for name in names}) == len(names)


def test_a_process_that_is_killed_leaves_no_second_run_in_mlflow(run: RunDir) -> None:
    run.config.write_text(f"{CONFIG}notes: {{{', '.join(f'key{number}: 1' for number in range(250))}}}")
    (warning,) = track(run, name="mlflow", HOW="is killed")
    assert "mlflow failed" in warning
    assert track(run, name="mlflow") == []
    assert [line.get("mlflow.source.git.commit") for line in sent() if "created" in line] == ["abc123"]
    assert sum("notes.key" in line.get("param", "") for line in sent()) == 250
    assert sent()[-1] == {"ended": "FINISHED"}


@pytest.mark.parametrize(("name", "ends"), [("wandb", [1, 0]), ("mlflow", ["KILLED", "FINISHED"])])
def test_a_run_whose_launcher_was_killed_has_not_finished(name: TrackerName, ends: list[object], run: RunDir) -> None:
    lines = run.events.read_text(encoding="utf-8").splitlines(keepends=True)
    run.events.write_text("".join(line for line in lines if "RunEnded" not in line), encoding="utf-8")
    assert track(run, name=name) == []
    start = TrainingStarted(**START, first_epoch=3, first_step=30)
    record(run.events, 2, "worker:0", start, RunEnded(status="done", step=30, epochs_done=3, seconds=9.0))
    assert track(run, name=name) == []
    assert [line["ended"] for line in sent() if "ended" in line] == ends


def test_values_of_a_running_run(run: RunDir) -> None:
    record(run.events, 2, "worker:0", TrainingStarted(**START, first_epoch=3, first_step=30), done(35, 2.0))
    with run.lock():
        assert track(run) == []
    assert sent()[-1]["ended"] == 0


def test_a_copy_is_another_run_in_the_tracker_and_a_moved_run_is_not(run: RunDir) -> None:
    assert track(run) == []
    shutil.copytree(run.path, "runs/fork")
    fork = RunDir("runs/fork")
    start = TrainingStarted(**START, first_epoch=3, first_step=30)
    record(fork.events, 2, "worker:0", start, done(35, 2.0))
    assert track(fork) == []
    fork.path.rename("runs/moved")
    Path("link").symlink_to("runs/moved")
    for path, step in (("runs/moved", 40), ("link", 45)):
        record(RunDir(path).events, 2, "worker:0", done(step, 1.0))
        assert track(RunDir(path)) == []
    record(run.events, 2, "worker:0", start, done(50, 2.0))
    assert track(run) == []
    original, copied = dict.fromkeys(row["id"] for row in sent())
    numbers = {id: [row["row"] for row in sent() if row["id"] == id and "row" in row] for id in (original, copied)}
    assert numbers == {original: [*range(ROWS + 1)], copied: [*range(ROWS + 3)]}


@pytest.mark.parametrize(("server", "names"), [("", ["job"]), ("http://host", ["job", "fork"])])
def test_a_copy_continues_only_the_database_in_its_folder(server: str, names: list[str], run: RunDir) -> None:
    assert track(run, name="mlflow", MLFLOW_TRACKING_URI=server) == []
    shutil.copytree(run.path, "runs/fork")
    fork = RunDir("runs/fork")
    record(fork.events, 2, "worker:0", TrainingStarted(**START, first_epoch=3, first_step=30), done(35, 2.0))
    assert track(fork, name="mlflow", MLFLOW_TRACKING_URI=server) == []
    assert [line["created"] for line in sent() if "created" in line] == names


def test_a_tracker_that_hangs_is_left(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlaunch.jobs.tracking._DEADLINE_S", 0.5)
    (warning,) = track(run, HOW="hangs")
    assert "did not get all values within 0.5 s" in warning


def test_a_tracker_that_hangs_is_left_at_once_if_the_user_wants(run: RunDir) -> None:
    (warning,) = track(run, lambda: True, HOW="hangs")
    assert "did not get all values before the wait for it was ended" in warning


def test_a_disk_without_locks(run: RunDir) -> None:
    refuses = "import errno, fcntl\n\ndef refuse(*_): raise OSError(errno.ENOLCK, '')\n\nfcntl.flock = refuse\n"
    Path("packages/sitecustomize.py").write_text(refuses)
    assert track(run) == []
    assert sent()


def test_a_folder_that_cannot_be_written_is_a_warning(run: RunDir) -> None:
    (run.path / "tracking").write_text("")
    (warning,) = track(run)
    assert "wandb cannot be started" in warning


def test_the_command_sends_what_is_missing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(run, monkeypatch) == "sent to wandb\n"
    assert len(sent()) == 2 + ROWS
    assert command(run, monkeypatch, "wandb") == "nothing new to send to wandb\n"
    assert len(sent()) == 2 + ROWS
    unknown = CliRunner().invoke(cli, ["track", "runs/job", "neptune"])
    assert unknown.exit_code == 2
    assert "'wandb', 'mlflow', 'trackio', 'tensorboard'" in unknown.output


def test_the_command_does_not_wait_for_a_run_that_sends_its_values_itself(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "tracking").mkdir()
    with (run.path / "tracking" / "wandb.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "wandb already gets the values from another process" in command(run, monkeypatch)
    assert command(run, monkeypatch) == "sent to wandb\n"


def test_a_tracker_without_its_package_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = missing_trackers(["mlflow"])
    assert problem.key == ("tracking", 0)
    assert problem.message == "mlflow is not installed: pip install 'distlaunch[mlflow]'"
