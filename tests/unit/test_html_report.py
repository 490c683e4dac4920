"""`report.html`: its data are those of the events, and nothing in a run can break or leave the page."""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from distlaunch.base import event_files
from distlaunch.base.events import Event, StepsDone, TaskFailed, TrainingStarted
from distlaunch.base.git import describe_code
from distlaunch.base.report_page import write_page_in_child
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from distlaunch.ui.html_report.data import MAX_POINTS, thinned
from distlaunch.ui.html_report.page import page
from tests.recorded_run import START, data_of, done, ended, make_run, record, timed


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return make_run(RunDir("runs/job"))


def test_curves_are_those_of_the_events(run: RunDir) -> None:
    data = data_of(page(run))
    loss = data["curves"]["loss"]
    assert loss["epochs"] == {"x": [10, 20, 30], "y": [8.0, 6.0, 3.0]}
    assert loss["validation"] == {"x": [10, 20, 30], "y": [16.0, 12.0, 6.0]}
    # step 23 was trained again
    assert loss["steps"]["x"] == [*range(1, 21), 25, 30]
    assert loss["steps"]["y"] == [float(f"{100 / step:.6g}") for step in range(1, 21)] + [4.0, 3.0]
    assert data["restarts"] == [{"attempt": 1, "step": 20}]
    assert [one["step"] for one in data["epochs"]] == [10, 20, 30]
    speed = data["speed"]
    assert speed["worker:0"]["step_ms"] == {"x": [10, 19, 29], "y": [200.0, 200.0, 100.0]}
    assert speed["worker:0"]["examples_per_s"]["y"] == [320.0, 320.0, 640.0]
    assert speed["worker:1"]["input_percent"] == {"x": [10], "y": [25.0]}
    assert speed["worker:1"]["memory_mb"]["y"] == [pytest.approx(536.87, abs=0.01)]
    assert data["layers"][0]["parameters"] == 51
    assert data["parameters"] == 4321
    failed, _ = data["attempts"]
    assert (failed["culprit"], failed["lines"]) == ("worker:1", ["the last words"])


def test_an_attempt_that_fails_before_training_keeps_the_speed_of_earlier_ones(run: RunDir) -> None:
    before = data_of(page(run))["speed"]
    lost = TaskFailed(failed_task="worker:0", host="box", reason="ImportError", log="")
    record(run.events, 2, "worker:0", lost)
    run.write_json(run.attempt_plan(2), {"mode": "train"})
    assert data_of(page(run))["speed"] == before


def test_times_of_workers_of_servers_are_at_the_steps_of_the_run(tmp_path: Path) -> None:
    """Two workers make the steps of a run; one is restarted after the 4th second, and counts from 0 again."""
    run = RunDir(tmp_path / "servers")

    def write(path: Path, task: str, *events: tuple[float, Event]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [dataclasses.replace(event, time=at, task=task, format_version=2).to_json() for at, event in events]
        path.write_text("".join(line + "\n" for line in lines))

    start = TrainingStarted(**{**START, "strategy": "parameter_server"}, first_epoch=2, first_step=1_000)
    write(run.events, "chief:0", (0.0, start), *((float(at), done(1_000 + 20 * at, 0.5)) for at in range(1, 8)))
    steps = {1: 10, 2: 20, 4: 40, 5: 5, 7: 25}
    times = [(at + 0.5, timed(number, number / 10, 64.0 * number)) for at, number in steps.items()]
    write(run.task(0, "worker:0").events, "worker:0", (0.5, timed(1, 0.1, 64.0)), *times)
    run.write_json(run.attempt_plan(0), {"mode": "train"})
    step_ms = data_of(page(run))["speed"]["worker:0"]["step_ms"]
    assert step_ms == {"x": [1_000, 1_020, 1_040, 1_080, 1_100, 1_140], "y": [100.0] * 6}


def test_no_text_of_a_run_ends_the_script(run: RunDir) -> None:
    record(run.events, 1, "worker:0", ended(3, 1.0, **{"</script><img src=x onerror=alert(1)>": 1.0, "nan": math.nan}))
    text = page(run)
    assert "<img" not in text
    data = data_of(text)
    assert "</script><img src=x onerror=alert(1)>" in data["curves"]
    assert data["curves"]["nan"]["epochs"]["y"] == ["nan"]
    assert "default-src 'none'" in text
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text), "it would load something"


def test_a_long_run_has_a_small_page(run: RunDir) -> None:
    names = {f"metric_{number}": 0.1234567 * number for number in range(10)}
    steps = [
        StepsDone(epoch=0, step=step, step_in_epoch=step, steps=20, seconds=0.1, logs={"loss": math.sin(step), **names})
        for step in range(20, 200_001, 20)
    ]
    record(run.events, 1, "worker:0", *steps)
    text = page(run)
    assert len(text) < 2_000_000
    loss = data_of(text)["curves"]["loss"]["steps"]
    assert len(loss["x"]) <= MAX_POINTS
    assert loss["x"][-1] == 200_000


def test_a_page_parses_a_sample_of_very_many_reports(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = Event.from_json

    def count(line: str) -> Event:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(Event, "from_json", count)
    monkeypatch.setattr(event_files, "MAX_REPORTS", 50)
    before = data_of(page(run))
    num_before = len(parsed)
    reports: list[Event] = []
    for step in range(31, 1_042):
        reports += [done(step, 1 / step), timed(step, step / 10, 64.0 * step)]
    record(run.events, 1, "worker:0", *reports)
    record(run.task(1, "worker:1").events, 1, "worker:1", *(timed(step, 0.1 * step, 1.0) for step in range(1, 1_000)))
    data = data_of(page(run))
    assert len(parsed) < 2 * num_before + 250
    loss = data["curves"]["loss"]
    assert loss["epochs"] == before["curves"]["loss"]["epochs"]
    assert (loss["steps"]["x"][-1], loss["steps"]["y"][-1]) == (1_041, float(f"{1 / 1_041:.6g}"))
    assert 50 < len(loss["steps"]["x"]) < 100
    assert data["speed"]["worker:0"]["step_ms"]["y"][-1] == pytest.approx(100)


def test_thinned_curves_keep_extremes_and_the_end() -> None:
    points = [(float(at), math.sin(at / 50)) for at in range(10_000)]
    points[4321] = (4321.0, 7.0)
    points[9] = (9.0, -7.0)
    kept = thinned(points, 300)
    assert len(kept) <= 300
    assert {points[4321], points[9], points[-1]} <= {*kept}
    assert kept == sorted(kept)
    assert thinned(points[:300], 300) == points[:300]


def test_thinned_curves_keep_extremes_beside_nan() -> None:
    points = [(float(at), 1.0) for at in range(1_000)]
    points[0], points[500] = (0.0, math.nan), (500.0, math.nan)
    points[2], points[501] = (2.0, 1e6), (501.0, -1e6)
    points[990:] = [(float(at), math.nan) for at in range(990, 1_000)]
    kept = thinned(points, 30)
    assert {points[2], points[501]} <= {*kept}
    assert kept[-1] is points[-1]


def test_a_config_shows_what_differs_from_the_defaults(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def model(): ...\ndef data(): ...\n")
    run.config.write_text(
        "model: {function: mine.py:model}\ndata: {function: mine.py:data, global_batch: 32, shuffle: false}\n"
        "compile: {optimizer: sgd, loss: mse}\ntrain: {epochs: 7}\nstrategy: {kind: mirrored, replicas: 2}\n"
    )
    lines = {line["text"].strip(): line["differs"] for line in data_of(page(run))["config"]}
    assert {text for text, differs in lines.items() if differs} >= {"epochs: 7", "shuffle: false", "replicas: 2"}
    assert lines["loop: fit"] is False
    assert lines["seed: 0"] is False


@pytest.mark.parametrize(
    ("text", "differing"),
    [
        ("data: {function: mine.py:data}\nstrategy: {kind: jax, mesh: {batch: 2}, layout: auto}\n", {"layout: auto"}),
        ("data: {tfds: {name: mnist, data_dir: /data}}\n", {"data_dir: /data"}),
    ],
)
def test_values_that_a_section_requires_do_not_differ(run: RunDir, text: str, differing: set[str]) -> None:
    run.config.write_text(f"model: {{function: mine.py:model}}\n{text}")
    lines = data_of(page(run))["config"]
    assert {line["text"].strip() for line in lines if line["differs"]} == differing


def test_a_run_that_failed_at_once_has_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "early")
    run.path.mkdir(parents=True)
    run.config.write_text("nonsense: [")
    data = data_of(page(run))
    assert (data["curves"], data["speed"], data["config"]) == ({}, {}, [])
    assert ["run", str(run.path)] in data["facts"] or data["facts"][0][0] == "run"


def test_the_command_writes_where_it_is_told(run: RunDir, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["report", "runs/job", "--html"])
    assert (result.exit_code, result.output) == (0, "runs/job/report.html\n")
    assert CliRunner().invoke(cli, ["report", "runs/job", "--html", "mine.html"]).exit_code == 0
    assert data_of((tmp_path / "mine.html").read_text()) == data_of(run.report.read_text())


def test_a_page_for_a_pipe_or_behind_a_link(run: RunDir, tmp_path: Path) -> None:
    os.mkfifo("pipe")
    reading = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 1 << 20)
    Path("link.html").symlink_to(tmp_path / "linked.html")
    try:
        assert CliRunner().invoke(cli, ["report", "runs/job", "--html", "pipe"]).stdout == ""
        assert Path("pipe").is_fifo()
        found = data_of(os.read(reading, 1 << 20).decode())
    finally:
        os.close(reading)
    for _ in range(2):  # at first, the link leads nowhere
        assert CliRunner().invoke(cli, ["report", "runs/job", "--html", "link.html"]).stdout == "link.html\n"
    assert Path("link.html").is_symlink()
    assert data_of((tmp_path / "linked.html").read_text()) == found


def test_a_page_on_standard_output(run: RunDir, tmp_path: Path) -> None:
    # not /dev/stdout, which a mistake would replace for the whole machine
    words = [sys.executable, "-m", "distlaunch", "report", "runs/job", "--html", "/dev/fd/1"]
    with (tmp_path / "out.html").open("wb") as file:
        subprocess.run(words, stdout=file, check=True)
        assert os.fstat(file.fileno()).st_size > 0
    assert data_of((tmp_path / "out.html").read_text())


def test_a_page_that_cannot_be_written_is_no_failure(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_page_in_child(run, {})
    assert run.report.exists()
    assert capsys.readouterr().err == ""
    run.report.unlink()
    write_page_in_child(run, {"DISTLAUNCH_REPORT": "off"})
    assert not run.report.exists()
    run.report.mkdir()
    write_page_in_child(run, {})
    assert run.report.is_dir()
    assert capsys.readouterr().err == f"report.html was not written; try `distlaunch report {run.path} --html`\n"


def test_the_end_of_a_large_log(run: RunDir) -> None:
    failed, _ = data_of(page(run))["attempts"]
    log = failed["log"]
    with Path(log).open("ab") as file:
        file.truncate(100 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last line\n")
    failed, _ = data_of(page(run))["attempts"]
    assert failed["lines"][-1] == "the last line"


def test_commit_and_changes_of_the_code_are_recorded(tmp_path: Path) -> None:
    assert describe_code(tmp_path) is None

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "mine.py").write_text("rate = 1\n")
    git("add", "mine.py")
    git("-c", "user.name=me", "-c", "user.email=me@example.com", "commit", "-m", "first")
    code = describe_code(tmp_path)
    assert code is not None
    assert re.fullmatch("[0-9a-f]{40}", code["commit"])
    assert code["diff"] == ""
    # a value that a variable calls a secret
    (tmp_path / "mine.py").write_text("rate = 2\nkey = 'hunter2-hunter2'\n")
    changed = describe_code(tmp_path, {"MY_API_KEY": "hunter2-hunter2"})
    assert changed is not None
    assert "+rate = 2" in changed["diff"]
    assert "hunter2" not in changed["diff"]


def test_the_module_needs_no_framework(run: RunDir) -> None:
    code = (
        "import sys\nfrom distlaunch.base.run_dir import RunDir\nfrom distlaunch.ui.html_report.page import page\n"
        f"page(RunDir({str(run.path)!r}))\nassert not {{'tensorflow', 'keras', 'jax'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
