"""`distlaunch report`, from recorded events."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from distlaunch.base.errors import UsageError
from distlaunch.base.events import (
    CheckpointSaved,
    DataResolved,
    EpochEnded,
    Evaluated,
    Exported,
    RunEnded,
    StepsDone,
    TaskFailed,
    TaskRestarted,
    TaskStarted,
    TrainingStarted,
    VariablesPlaced,
)
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from distlaunch.runs.listing import summarize
from distlaunch.ui.placement import bytes_per_task, placement_lines, task_lines
from tests.recorded_run import record, timed

START: dict[str, Any] = {
    "strategy": "parameter_server", "loop": "fit", "replicas": 2, "tasks": 4, "global_batch": 64, "epochs": 2,
    "first_epoch": 0, "steps_per_epoch": 100, "parameters": 10,
}  # fmt: skip
VARIABLES: list[dict[str, Any]] = [
    {
        "name": "model/dense/kernel",
        "shape": [784, 128],
        "dtype": "float32",
        "parts": [
            {"task": "ps:0", "rows": [0, 392], "bytes": 200704},
            {"task": "ps:1", "rows": [392, 784], "bytes": 200704},
        ],
    },
    {
        "name": "model/dense/bias",
        "shape": [128],
        "dtype": "float32",
        "parts": [{"task": "ps:0", "rows": None, "bytes": 512}],
    },
    {
        "name": "optimizer/learning_rate",
        "shape": [],
        "dtype": "float32",
        "parts": [{"task": "ps:1", "rows": None, "bytes": 4}],
    },
]


def epoch(number: int, loss: float) -> EpochEnded:
    logs = {"loss": loss, "accuracy": 1 - loss, "val_loss": loss * 2, "val_accuracy": 0.5, "learning_rate": 1e-5}
    return EpochEnded(epoch=number, step=100 * number + 100, seconds=12.5, logs=logs)


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(step=step, path=f"/elsewhere/step-{step:08}", num_bytes=1_234_567, seconds=0.1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that lost a parameter server, was started again, was evaluated, and lost the older of its checkpoints."""
    monkeypatch.chdir(tmp_path)
    run = RunDir("runs/job")
    run.path.mkdir(parents=True)
    run.config.write_text("")
    for attempt in range(3):
        for task in ("chief:0", "evaluator:0"):
            run.task(attempt, task).path.mkdir(parents=True)
    (run.checkpoints / "step-00000200").mkdir(parents=True)
    run.export.mkdir()
    (run.export / "model.keras").touch()
    log = str(run.task(0, "ps:1").stderr_log)
    record(
        run.events, 0, "chief:0", TaskStarted(host="a", pid=1),
        DataResolved(name="m:data", source="memory", examples={"train": 6400, "validation": 100}),
        TrainingStarted(**START, first_step=0), VariablesPlaced(variables=VARIABLES[:1]),
        StepsDone(epoch=0, step=100, step_in_epoch=100, steps=100, seconds=1, logs={}), epoch(0, 0.5), saved(100),
        StepsDone(epoch=1, step=150, step_in_epoch=50, steps=50, seconds=1, logs={}),
    )  # fmt: skip
    record(
        run.events, 0, "launcher", TaskRestarted(restarted_task="worker:1", host="a", reason="was killed by SIGKILL"),
        TaskRestarted(restarted_task="worker:1", host="a", reason="was killed by SIGKILL"),
        TaskFailed(failed_task="ps:1", host="a", reason="killed by SIGKILL", log=log),
        RunEnded(status="failed", step=150, epochs_done=1, seconds=83),
    )  # fmt: skip
    record(
        run.events, 1, "chief:0", TrainingStarted(**{**START, "first_epoch": 1}, first_step=100),
        VariablesPlaced(variables=VARIABLES), epoch(1, 0.25), saved(200),
        Exported(format="keras", path=str(run.export / "model.keras")),
        RunEnded(status="done", step=200, epochs_done=2, seconds=20),
    )  # fmt: skip
    record(run.task(0, "evaluator:0").events, 0, "evaluator:0", result(100, 0.9))
    record(run.task(1, "evaluator:0").events, 1, "evaluator:0", result(100, 0.75), result(200, 0.5))
    run.write_json(run.attempt_plan(2), {"mode": "evaluate"})
    record(run.events, 2, "chief:0", TaskStarted(host="a", pid=1), result(200, 0.5))
    return run


def result(step: int, loss: float) -> Evaluated:
    return Evaluated(step=step, split="validation", logs={"loss": loss, "accuracy": 0.88})


def report(*words: str) -> str:
    outcome = CliRunner().invoke(cli, ["report", *words], catch_exceptions=False)
    assert outcome.exit_code == 0
    return outcome.output


def test_a_slow_task_is_named_with_its_host(run: RunDir) -> None:
    for task, host, step_s in (("worker:0", "a", 0.1), ("worker:1", "b", 0.5)):
        times = replace(timed(10, 2.0, 640), step_median_s=step_s, reads_ahead=False)
        record(run.task(1, task).events, 1, task, TaskStarted(host=host, pid=1), times)
    assert "worker:1 on b takes 5.0 times as long as the others" in report("runs/job")


def test_report(run: RunDir, golden: Callable[[str, str], None]) -> None:
    golden("ui/report.txt", report("runs/job"))


def test_report_as_json(run: RunDir) -> None:
    told = json.loads(report("runs/job", "--json"))
    assert (told["status"], told["strategy"], told["name"]) == ("done", "parameter_server", "job")
    assert [attempt["culprit"] for attempt in told["attempts"]] == ["ps:1", "", ""]
    assert told["attempts"][0]["restarts"] == {"worker:1": 2}
    assert told["attempts"][2]["mode"] == "evaluate"
    assert [(each["step"], each["logs"]["loss"]) for each in told["evaluator"]] == [(100, 0.75), (200, 0.5)]
    assert [each["step"] for each in told["checkpoints"]] == [200]
    assert told["variables"] == VARIABLES
    assert told["bytes_per_task"] == {"ps:0": 201216, "ps:1": 200708}


def test_a_moved_run_names_its_files_where_they_are(run: RunDir, tmp_path: Path) -> None:
    log = run.task(0, "ps:1").stderr_log
    log.parent.mkdir()
    log.write_text("the last words\n")
    moved = RunDir(tmp_path / "elsewhere/job")
    shutil.copytree(run.path, moved.path)
    told = json.loads(report(str(moved.path), "--json"))
    assert told["exports"] == {"keras": str(moved.export / "model.keras")}
    assert told["attempts"][0]["log"] == str(moved.task(0, "ps:1").stderr_log)
    (moved.export / "model.keras").unlink()
    assert json.loads(report(str(moved.path), "--json"))["exports"] == {}


def test_the_best_checkpoint_is_marked(run: RunDir) -> None:
    def keep(folder: str, step: int, saved_at: float) -> None:
        (run.checkpoints / folder).mkdir(exist_ok=True)
        run.write_json(run.checkpoints / folder / "meta.json", {"saved_at": saved_at, "progress": {"step": step}})

    def told() -> list[tuple[int, str, bool]]:
        listed = json.loads(report("runs/job", "--json"))["checkpoints"]
        return [(each["step"], Path(each["path"]).name, each["best"]) for each in listed]

    newest = "step-00000200"
    assert told() == [(200, newest, False)]
    keep(newest, 200, 2.0)
    keep("best", 200, 2.0)
    assert told() == [(200, newest, True)]
    assert "1.2 MB   runs/job/checkpoints/step-00000200 (best)\n" in report("runs/job")
    keep("best", 200, 1.0)  # the same step, before it was trained again
    assert told() == [(200, newest, False), (200, "best", True)]
    keep("best", 100, 1.0)
    assert told() == [(100, "best", True), (200, newest, False)]
    assert "1.2 MB   runs/job/checkpoints/best (best)\n" in report("runs/job")
    (run.checkpoints / "best/meta.json").write_text("damaged")
    assert told() == [(200, newest, False)]


def test_a_run_that_is_going_on_or_was_lost(run: RunDir) -> None:
    run.task(3, "chief:0").path.mkdir(parents=True)
    assert json.loads(report("runs/job", "--json"))["status"] == "killed"
    with run.lock():
        assert json.loads(report("runs/job", "--json"))["status"] == "running"


def test_a_failed_evaluation_is_not_the_runs_failure(run: RunDir) -> None:
    run.task(3, "chief:0").path.mkdir(parents=True)
    run.write_json(run.attempt_plan(3), {"mode": "evaluate"})
    record(run.events, 3, "launcher", TaskFailed(failed_task="chief:0", host="a", reason="no checkpoint", log="x"))
    told = json.loads(report("runs/job", "--json"))
    assert told["status"] == "done"
    assert told["attempts"][3]["mode"] == "evaluate"
    assert "evaluate: failed" in report("runs/job")


def test_a_script_began_with_its_first_task(tmp_path: Path) -> None:
    """The run's own file tells nothing of a script until its end."""
    run = RunDir(tmp_path)
    files = run.task(0, "worker:0")
    files.path.mkdir(parents=True)
    run.write_json(run.plan, {})
    run.write_json(run.attempt_plan(0), {"mode": "run"})
    files.events.write_text(TaskStarted(time=100.0, task="worker:0", host="a", pid=1).to_json() + "\n")
    with run.lock():
        assert summarize(run, 130.0).started == 100
        assert summarize(run, 130.0).seconds == 30
    ended = RunEnded(time=160.0, task="launcher", status="done", step=0, epochs_done=0, seconds=60.0)
    run.events.write_text(ended.to_json() + "\n")
    told = summarize(run)
    assert (told.status, told.started, told.seconds) == ("done", 100, 60)


def test_a_config_that_a_task_found_wrong(run: RunDir) -> None:
    files = run.task(3, "chief:0")
    files.path.mkdir(parents=True)
    problem = {"key": ["strategy", "layout", "x"], "message": "matches no variable"}
    run.write_json(files.error_json, {"kind": "config", "problems": [problem]})
    told = report("runs/job")
    assert "config: strategy.layout.x: matches no variable" in told
    assert re.search(r"^status +done$", told, re.MULTILINE)  # the run was done before, and stays so


def test_a_run_that_never_began(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("not: complete\n")
    assert "status     killed" in report(str(tmp_path))


def test_an_attempt_that_has_made_no_step_yet(run: RunDir) -> None:
    run.task(3, "chief:0").path.mkdir(parents=True)
    record(run.events, 3, "chief:0", TrainingStarted(**{**START, "first_epoch": 2}, first_step=200))
    with run.lock():
        assert re.search(r"^ +3 +running +200 to 200\b", report("runs/job"), re.MULTILINE)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such run"):
        report(str(tmp_path / "nope"))


def test_it_needs_no_framework(run: RunDir) -> None:
    code = (
        "import sys; from distlaunch.cli.main import cli; cli(['report', 'runs/job'], standalone_mode=False);"
        "assert not {'tensorflow', 'keras', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_placement_tables() -> None:
    assert placement_lines(VARIABLES) == [
        "variable                  shape       task   rows             size",
        "model/dense/kernel        784 x 128   ps:0   0 to 391     200.7 kB",
        "                                      ps:1   392 to 783   200.7 kB",
        "model/dense/bias          128         ps:0   all             512 B",
        "optimizer/learning_rate   scalar      ps:1   all               4 B",
    ]
    assert task_lines(VARIABLES) == [
        "task   variables    weights   optimizer      total",
        "ps:0           2   201.2 kB         0 B   201.2 kB",
        "ps:1           2   200.7 kB         4 B   200.7 kB",
    ]
    assert bytes_per_task([]) == {}


def test_placement_on_a_mesh() -> None:
    parts = [{"task": f"device:{n}", "rows": None, "bounds": [[0, 784], [0, 64]], "bytes": 200704} for n in range(8)]
    kernel = {"name": "model/d1/kernel", "shape": [784, 128], "dtype": "float32", "layout": [None, "model"]}
    whole = {"name": "model/d2/bias", "shape": [10], "dtype": "float32", "layout": [None]}
    placed = [{**kernel, "parts": parts}, {**whole, "parts": [{**part, "bytes": 40} for part in parts]}]
    assert placement_lines(placed) == [
        "variable          shape       devices   layout        on each",
        "model/d1/kernel   784 x 128   8         [~, model]   200.7 kB",
        "model/d2/bias     10          8         all              40 B",
    ]
    assert task_lines(placed)[1] == "device:0           2   200.7 kB         0 B   200.7 kB"
