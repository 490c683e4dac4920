"""`distlaunch runs`, on runs that were written by the test: filters, order, the live table, and removal."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from distlaunch.base.errors import UsageError
from distlaunch.base.event_files import append_events
from distlaunch.base.events import EpochEnded, NumbersChecked, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_lock import lock_run
from distlaunch.base.run_files.submission import Submission
from distlaunch.cli.main import cli
from distlaunch.runs.find import open_run, parse_since
from distlaunch.runs.known import KnownRun, with_settings
from distlaunch.runs.listing import find_runs
from distlaunch.runs.paths import display_path
from distlaunch.ui.console import JobConsole
from distlaunch.ui.runs import follow_runs, print_runs
from tests.unit.written_runs import EPOCH_S, STARTED, STEPS, write_run

DAY = 86_400


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run("lr-low", {"compile.optimizer.args.learning_rate": 0.001}, [0.9, 0.8], accuracy=[0.1, 0.2])
    write_run(
        "lr-high", {"compile.optimizer.args.learning_rate": 0.1}, [0.5, 0.6], accuracy=[0.5, 0.4], status="stopped"
    )
    write_run("old", {}, [0.7], accuracy=[0.3], started=STARTED - 2 * DAY, pause_s=3600.0, status="failed")
    return tmp_path


def runs(*words: str, **options: Any) -> Result:
    return CliRunner().invoke(cli, ["runs", *words], catch_exceptions=False, **options)


def names(*words: str) -> list[str]:
    return [Path(each["run"]).name for each in json.loads(runs(*words, "--json").stdout)]


def known() -> list[KnownRun]:
    return with_settings(find_runs(Path("runs").absolute(), time.time())[0])[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "old lr-low lr-high"),
        (("--status", "done"), "lr-low"),
        (("--status", "done", "--status", "failed"), "old lr-low"),
        (("--name", "lr-*"), "lr-low lr-high"),
        (("--name", "lr-*", "--name", "old", "--status", "stopped"), "lr-high"),
        (("--name", "runs/lr-low"), "lr-low"),
        (("--name", "runs/*-low"), "lr-low"),
        (("--name", "./runs/lr-*"), "lr-low lr-high"),
        (("--name", "none"), ""),
        (("--name", "r*"), ""),  # the name of the folder around them
        (("--name", "*/*"), "old lr-low lr-high"),
        (("--name", "*/*/*"), ""),
        (("--since", "2026-09-21"), "lr-low lr-high"),
        (("--since", "9999d"), "old lr-low lr-high"),
        (("--sort", "val_loss"), "lr-high old lr-low"),
        (("--sort", "learning_rate"), "lr-low old lr-high"),
        (("--sort", "run", "--reverse"), "old lr-low lr-high"),
        (("--reverse",), "lr-high lr-low old"),
    ],
)
def test_filters_and_order(words: tuple[str, ...], expected: str) -> None:
    assert " ".join(names(*words)) == expected


def test_values_and_settings_in_the_listing() -> None:
    found = {Path(each["run"]).name: each for each in json.loads(runs("--json").stdout)}
    assert found["lr-high"]["best"]["val_loss"] == {"value": 0.5, "epoch": 0, "step": 10}
    assert found["lr-high"]["settings"] == {"compile.optimizer.args.learning_rate": 0.1}
    assert (found["old"]["seconds"], found["old"]["attempts"]) == (EPOCH_S, 2), "without the pause of an hour"
    assert found["old"]["goodput"]["seconds"]["pauses"] == 3600
    assert found["lr-low"]["goodput"]["share"] == 0.5
    head, *lines = runs().stdout.splitlines()
    assert re.split(r" {3,}", head)[-7:] == [
        *("last values", "best val_loss", "best val_accuracy", "learning_rate", "started", "time", "attempts")
    ]
    assert re.split(r" {3,}", lines[2])[5:8] == ["0.5000 (1)", "0.5000 (1)", "0.1"]


def test_a_long_last_attempt(folder: Path) -> None:
    """Its start is neither among the first nor among the last events of the file, which are read in full."""
    run = write_run("long", {}, [0.5] * 3, accuracy=[0.1, 0.2, 0.9], status="stopped")
    start = TrainingStarted(
        strategy="mirrored", loop="fit", replicas=2, tasks=1, global_batch=32, epochs=4000, first_epoch=1,
        first_step=STEPS, steps_per_epoch=STEPS, parameters=1, optimizer="",
    )  # fmt: skip
    checked = NumbersChecked(
        status="differs", part="steps 1-3", message="", deviation=0.5, reference="Keras", subject=""
    )
    epochs = [
        EpochEnded(epoch=number, step=STEPS * (number + 1), seconds=1.0, logs={"val_accuracy": 0.3}, learning_rate=0.1)
        for number in range(1, 1000)
    ]
    run.write_json(run.attempt_plan(1), {"mode": "train", "chief": "worker:0", "tasks": []})
    append_events(run.events, start, checked, *epochs, attempt=1, task="worker:0")
    (found,) = [each for each in json.loads(runs("--json").stdout) if each["run"].endswith("long")]
    assert (found["strategy"], found["epoch"], found["epochs"]) == ("mirrored", 1000, 4000)
    assert found["numbers"] == "differs"
    # epochs 2 and 3 of the first attempt were discarded
    assert found["best"]["val_accuracy"] == {"value": 0.3, "epoch": 1, "step": 2 * STEPS}


def test_dates_and_ages() -> None:
    assert parse_since("12h", 1e6) == 1e6 - 12 * 3600
    assert parse_since("1.5 d", 1e6) == 1e6 - 1.5 * DAY
    assert parse_since("2026-11-27 14:30") == time.mktime((2026, 11, 27, 14, 30, 0, 0, 0, -1))
    for text in ("x", "7", "-7d", "2026-13-01", "9" * 30 + "d"):
        with pytest.raises(ValueError, match=re.escape(text)):
            parse_since(text)
    assert runs("--since", "soon").exit_code == 2


@pytest.mark.parametrize("width", [12, 40, 60, 100, 160])
def test_it_fits_the_terminal(width: int) -> None:
    file = Terminal()
    print_runs(JobConsole(file=file, width=width, color_system=None), known(), "val_loss")
    lines = file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[0].split()[0] == "run"
    assert ("best val_loss" in lines[0]) == (width >= 40)
    assert ("learning_rate" in lines[0]) == (width >= 60)
    assert ("left out" in file.getvalue()) == (width < 160)


def test_a_live_table_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = Terminal(), list[int]()

    def list_runs() -> list[KnownRun]:
        seen.append(len(known()))
        if len(seen) == 3:
            raise KeyboardInterrupt
        write_run(f"new-{len(seen)}", {}, [0.5])
        return known()

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(KeyboardInterrupt):
        follow_runs(JobConsole(file=file, width=100, height=7, color_system=None, force_terminal=True), list_runs)
    assert seen == [3, 4, 5]
    last = file.getvalue().rpartition("run  ")[2]
    assert "... and 1 other run" in last
    assert "runs/old" not in last
    assert "runs/new-2" in last


@pytest.mark.parametrize("order", [(), ("--reverse",)])
def test_a_low_live_table_shows_the_newest_runs(order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    console = JobConsole(file=file, width=100, height=4, color_system=None, force_terminal=True)
    monkeypatch.setattr("distlaunch.ui.console.JobConsole", lambda: console)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    runs("-f", *order)
    assert "runs/lr-high" in file.getvalue()
    assert "... and 2 other runs" in file.getvalue()


def test_following_needs_a_terminal() -> None:
    with pytest.raises(UsageError, match="--follow needs a terminal"):
        runs("-f")


def test_removal_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="for one run: --name NAME"):
        runs("--remove")
    with pytest.raises(UsageError, match="add --yes"):
        runs("--remove", "--name", "lr-*")
    shown = runs("--remove", "--name", "lr-*", "--dry-run").stdout
    assert re.findall(r"^would remove  (\S+)", shown, re.MULTILINE) == ["runs/lr-low", "runs/lr-high"]
    assert "would remove 2 runs (" in shown
    assert len(names()) == 3
    for words in (("--yes",), ("--dry-run",), ("--remove", "--json", "--name", "x")):
        assert runs(*words).exit_code == 2


@pytest.mark.parametrize(("answer", "left"), [("y\n", ["old"]), ("n\n", ["old", "lr-low", "lr-high"]), ("\n", None)])
def test_the_answer_decides(monkeypatch: pytest.MonkeyPatch, answer: str, left: list[str] | None) -> None:
    monkeypatch.setattr("distlaunch.cli.runs.has_terminal", lambda: True)
    done = runs("--remove", "--name", "lr-*", input=answer)
    assert done.exit_code == 0
    assert "Remove 2 runs (" in done.stdout
    assert names() == (left or ["old", "lr-low", "lr-high"])


def test_running_runs_are_never_removed(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    (folder / "runs/old").rename(elsewhere)
    (folder / "runs/old").symlink_to(elsewhere)
    evaluated = RunDir("runs/lr-low")
    with RunDir("runs/lr-high").lock(), lock_run(evaluated.reader_control(0).with_name(".lock")):
        done = runs("--remove", "--name", "*", "--yes")
    assert (done.exit_code, done.stdout) == (0, "")
    assert sorted(done.stderr.splitlines()) == [
        "kept     runs/lr-high: it is running",
        "kept     runs/lr-low: a process works on it",
        "kept     runs/old: it is a link; remove it with `rm`",
        "there is nothing to remove",
    ]
    done = runs("--remove", "--name", "*", "--yes")
    assert done.stdout.splitlines() == ["removed  runs/lr-low", "removed  runs/lr-high"]
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["old"]
    assert (elsewhere / "events.jsonl").exists()


def test_a_run_whose_job_may_be_requeued_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scheduler is here that could say whether the stopped job waits in its queue."""
    monkeypatch.setenv("PATH", str(folder))
    run = RunDir("runs/lr-high")
    run.write_submission(Submission("slurm", "17", 0.0))
    run.batch_exit.write_text("4", encoding="utf-8")
    done = runs("--remove", "--name", "lr-high", "--yes")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "kept     runs/lr-high: its job 17 may run again, and the queue does not answer here;" in done.stderr
    run.batch_exit.write_text("0", encoding="utf-8")
    assert runs("--remove", "--name", "lr-high", "--yes").stdout == "removed  runs/lr-high\n"


def test_a_name_stands_for_a_run_in_runs() -> None:
    assert display_path(open_run("lr-low").path) == "runs/lr-low"
    Path("lr-low").mkdir()  # the user's, which is no run
    assert display_path(open_run("lr-low").path) == "runs/lr-low"
    shutil.copytree("runs/lr-high", "lr-low", dirs_exist_ok=True)
    assert display_path(open_run("lr-low").path) == "lr-low"
    with pytest.raises(UsageError, match=r"^lr-lo: there is no such run, neither here nor in runs; `distlaunch runs`"):
        open_run("lr-lo")
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=r"^empty: not a run directory \(no config.yaml and no plan.json\); "):
        open_run("empty")
