"""`report.html` in headless Chromium: no errors, the values of the events, keys, and narrow screens."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from distlaunch.base.events import EpochEnded, Event, StepsDone, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from distlaunch.ui.html_report.page import page
from tests.recorded_run import START, done, make_run, record, timed
from tests.unit.written_runs import write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

PROBE = """
<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
const texts = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
  texts.push(text);
  fillText.call(this, text, ...where);
};
addEventListener("load", () => {
  const found = { charts: document.querySelectorAll(".chart canvas").length };
  found.tools = [...document.querySelectorAll(".tools button")].map((each) => each.textContent);
  const notes = () => [...document.querySelectorAll(".chart")].map(
    (chart) => [chart.getAttribute("aria-label"), chart.querySelector(".note").textContent]).filter(([, text]) => text);
  found.notes = notes();
  const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
  found.colors = [...document.querySelectorAll(".u-legend .u-marker")].map((each) => each.style.border);
  found.ticks = [...new Set(texts)];
  press("l");
  found.notesOfLog = notes();
  press("l");
  for (const each of document.querySelectorAll(".chart .head button")) each.click();
  found.notesOfAll = notes();
  for (const key of ["e", "l", "d", "e", "l"]) press(key);
  const slider = document.querySelector("input[type=range]");
  if (slider) { slider.value = "0.9"; slider.dispatchEvent(new Event("input")); }
  for (const each of document.querySelectorAll("details")) each.open = true;
  setTimeout(() => {
    found.after = document.querySelectorAll(".chart canvas").length;
    found.theme = document.documentElement.dataset.theme;
    found.width = document.documentElement.scrollWidth;
    found.window = innerWidth;
    found.sections = [...document.querySelectorAll("section")].map((each) => each.id);
    found.values = [...document.querySelectorAll(".chart")].map((chart) => [
      chart.getAttribute("aria-label"),
      [...chart.querySelectorAll("details tbody tr")].map((row) => [...row.children].map((cell) => cell.textContent)),
    ]);
    found.unnamed = [...document.querySelectorAll("button, input")].filter(
      (each) => !each.textContent && !each.closest("label")).length;
    found.errors = errors;
    const shown = document.createElement("pre");
    shown.id = "probe";
    shown.textContent = JSON.stringify(found);
    document.body.append(shown);
  }, 200);
});
</script>
"""


def look_at(html: str, folder: Path, *, width: int = 1200) -> dict[str, Any]:
    """Open a page, press its keys, and return what a script in it has found."""
    assert CHROMIUM is not None
    file = folder / "page.html"
    # before the page's own script, so that errors of that are seen
    file.write_text(html.replace("<noscript>", PROBE + "<noscript>", 1))
    words = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run([*words, file.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    return json.loads(found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_a_page_shows_the_values_of_the_events(tmp_path: Path) -> None:
    found = look_at(page(make_run(RunDir(tmp_path / "job"))), tmp_path)
    assert found["errors"] == []
    assert found["charts"] == found["after"] == 1 + 5
    assert found["theme"] == "dark"
    assert found["unnamed"] == 0
    assert {"summary", "curves", "speed", "attempts", "model"} <= {*found["sections"]}
    values = dict(found["values"])
    assert found["notes"] == []
    assert ["validation, by epoch", "30", "6"] in values["loss"]
    assert ["train, within epochs", "25", "4"] in values["loss"]
    assert not [row for row in values["loss"] if row[1] == "23"]
    assert ["worker:0", "29", "640"] in values["examples per second, each task"]


@pytest.mark.parametrize("width", [1200, 500])
def test_a_long_run_fits_the_screen(width: int, tmp_path: Path) -> None:
    """Four tasks, two restarts, 200,000 steps."""
    run = make_run(RunDir(tmp_path / "job"))
    for attempt, (first, last) in enumerate([(0, 80_000), (79_000, 150_000), (149_500, 200_000)], 2):
        steps = [
            StepsDone(epoch=0, step=at, step_in_epoch=at, steps=20, seconds=0.1, logs={"loss": 1 / math.sqrt(at + 1)})
            for at in range(first + 20, last + 1, 20)
        ]
        start = TrainingStarted(**START, first_epoch=0, first_step=first)
        record(run.events, attempt, "worker:0", start, *steps)
        run.write_json(run.attempt_plan(attempt), {"mode": "train"})
        for task in range(4):
            times = [timed(number, number / 100, 64.0 * number) for number in range(500, last - first, 500)]
            record(run.task(attempt, f"worker:{task}").events, attempt, f"worker:{task}", *times)
    found = look_at(page(run), tmp_path, width=width)
    assert found["errors"] == []
    assert found["width"] <= found["window"]
    assert dict(found["values"])["loss"][-1][1] == "200,000"


def test_a_run_without_any_event_has_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text("")
    found = look_at(page(run), tmp_path)
    assert (found["errors"], found["charts"]) == ([], 0)


@pytest.mark.parametrize(("known", "axes"), [(500, 1), (None, 0)])
def test_the_axis_counts_epochs_only_if_their_length_is_known(known: int | None, axes: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text("")
    start = TrainingStarted(**{**START, "steps_per_epoch": known}, first_epoch=0, first_step=0)
    steps = [StepsDone(epoch=0, step=at, step_in_epoch=at, steps=1, seconds=0.1, logs={"loss": 1.0}) for at in (1, 2)]
    record(run.events, 0, "worker:0", start, *steps)
    found = look_at(page(run), tmp_path)
    assert (found["errors"], found["charts"]) == ([], 1)
    assert len([text for text in found["tools"] if "axis" in text]) == axes


def test_a_comparison_shows_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run("slow", {"compile.optimizer.args.learning_rate": 0.001}, [0.9, 0.8, 0.7])
    write_run("good", {"compile.optimizer.args.learning_rate": 0.01}, [0.5, 0.25])
    assert CliRunner().invoke(cli, ["compare", "--html", "all.html"]).exit_code == 0
    found = look_at((tmp_path / "all.html").read_text(), tmp_path)
    assert found["errors"] == []
    assert found["sections"] == ["runs", "curves", "shared"]
    assert dict(found["values"])["loss, validation"] == [
        ["runs/slow", "10", "0.9"], ["runs/slow", "20", "0.8"], ["runs/slow", "30", "0.7"],
        ["runs/good", "10", "0.5"], ["runs/good", "20", "0.25"],
    ]  # fmt: skip


def test_a_run_that_diverges_does_not_flatten_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run("good", {"compile.optimizer.args.learning_rate": 0.01}, [0.5, 0.25, 0.2])
    write_run("wild", {"compile.optimizer.args.learning_rate": 1.0}, [3e9, 4e30, math.nan])
    assert CliRunner().invoke(cli, ["compare", "--html", "all.html"]).exit_code == 0
    found = look_at((tmp_path / "all.html").read_text(), tmp_path)
    assert found["errors"] == []
    assert ["loss, validation", '2 values beyond 5 not shown; "show all" or the log scale show them'] in found["notes"]
    assert found["notesOfAll"] == []
    assert ["runs/wild", "20", "4.000e+30"] in dict(found["values"])["loss, validation"]


def test_values_that_grow_within_each_epoch_are_shown(tmp_path: Path) -> None:
    """Counts of 3 epochs, which begin near 0, beside small ones of the validation, and a loss that diverges."""
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text("")
    events: list[Event] = [TrainingStarted(**START, first_epoch=0, first_step=0)]
    for epoch in range(3):
        losses = [0.5, 1e9, 1e30]
        for step in range(1, 11):
            logs = {"loss": losses[epoch], "tp": 3.0 if step == 1 else 4000.0 * step}
            at = 10 * epoch + step
            events.append(StepsDone(epoch=epoch, step=at, step_in_epoch=step, steps=1, seconds=0.1, logs=logs))
        logs = {"loss": losses[epoch], "tp": 40_000.0, "val_tp": 30.0}
        events.append(EpochEnded(epoch=epoch, step=10 * epoch + 10, seconds=1.0, logs=logs))
    times = [timed(1, 1.0, 42.0), timed(2, 1.1, 6_000.0), timed(3, 1.2, 12_000.0)]
    record(run.events, 0, "worker:0", *events, *times)
    run.write_json(run.attempt_plan(0), {"mode": "train"})
    found = look_at(page(run), tmp_path)
    assert found["errors"] == []
    assert found["notes"] == [["loss", '22 values beyond 5 not shown; "show all" or the log scale show them']]


def test_ticks_have_the_digits_in_which_they_differ(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text("")
    start = TrainingStarted(**START, first_epoch=0, first_step=0)
    losses = [0.693_140 + 1e-6 * number for number in range(10)]
    record(run.events, 0, "worker:0", start, *(done(step, loss) for step, loss in enumerate(losses, 1)))
    found = look_at(page(run), tmp_path)
    assert found["errors"] == []
    labels = [text for text in found["ticks"] if text.startswith("0.6931")]
    assert len(labels) >= 4
    assert all(0.693_138 < float(text) < 0.693_152 for text in labels)


def test_a_log_scale_says_what_it_cannot_show(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text("")
    start = TrainingStarted(**START, first_epoch=0, first_step=0)
    logs = [{"loss": 0.5 - 0.2 * number, "score": -1.0 - number} for number in range(4)]
    steps = [
        StepsDone(epoch=0, step=at, step_in_epoch=at, steps=1, seconds=0.1, logs=each) for at, each in enumerate(logs)
    ]
    record(run.events, 0, "worker:0", start, *steps)
    found = look_at(page(run), tmp_path)
    assert (found["errors"], found["notes"]) == ([], [])
    assert found["notesOfLog"] == [
        ["loss", "1 value of 0 or less not shown: a log scale has none"],
        ["score", "4 values of 0 or less not shown: a log scale has none"],
    ]


def test_many_runs_look_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        write_run(f"run-{number}", {"seed": number}, [0.5, 0.4])
    assert CliRunner().invoke(cli, ["compare", "--html", "all.html"]).exit_code == 0
    found = look_at((tmp_path / "all.html").read_text(), tmp_path)
    assert found["errors"] == []
    looks = [look for look in found["colors"] if look]
    assert len({*looks}) >= 40
