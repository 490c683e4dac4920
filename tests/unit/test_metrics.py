"""A run's state as OpenMetrics: what a scrape returns and a text file holds, while the run trains and at its end."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from distlaunch.base.errors import UsageError
from distlaunch.base.events import AttemptStarted, StepsTimed, TaskRestarted, TaskStarted, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.metrics import Metrics, offering_metrics
from distlaunch.runs.metrics import RunCollector
from tests.recorded_run import START, done, ended, make_run, record, timed

HEADERS = {"Accept": "application/openmetrics-text; version=1.0.0"}
Values = dict[tuple[str, str], float]


def values_of(text: str) -> Values:
    """The values by name and by what tells apart those of a name."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("run", "path", "host")}
            found[sample.name, " ".join(labels[key] for key in sorted(labels, reverse=True))] = sample.value
    return found


def offer(run: RunDir, metrics: Metrics, said: list[str]) -> tuple[str, Values]:
    """Scrape a run once; return the type of the answer and its values."""
    with offering_metrics(run, metrics, os.environ, said.append):
        request = urllib.request.Request(metrics.url, headers=HEADERS)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return answer.headers["Content-Type"], values_of(answer.read().decode())


def test_a_run_is_scraped_and_written(tmp_path: Path) -> None:
    run, file, said = make_run(RunDir(tmp_path / "run")), tmp_path / "job.prom", []
    kind, scraped = offer(run, Metrics.open("0", str(file)), said)
    assert "openmetrics-text" in kind
    (note,) = said
    assert note.startswith("metrics at http://127.0.0.1:")
    assert scraped["distlaunch_running", ""] == 0
    assert scraped["distlaunch_attempt", ""] == 1
    assert scraped["distlaunch_step", ""] == 30
    assert scraped["distlaunch_epochs_done", ""] == scraped["distlaunch_epochs", ""] == 3
    assert scraped["distlaunch_value", "loss"] == 3.0
    assert scraped["distlaunch_value", "val_loss"] == 6.0
    assert scraped["distlaunch_step_seconds", "worker:0 0.99"] == 0.2
    assert scraped["distlaunch_examples_per_second", "worker:0"] == pytest.approx(640)
    assert scraped["distlaunch_memory_bytes", "worker:0"] == 512 << 20
    assert ("distlaunch_gpu_memory_bytes", "worker:0") not in scraped
    assert values_of(file.read_text()) == scraped


def test_a_restart_keeps_the_progress(tmp_path: Path) -> None:
    run = make_run(RunDir(tmp_path / "run"))
    record(run.events, 2, "launcher", AttemptStarted(waited_s=0.0))
    _, scraped = offer(run, Metrics.open("0", None), [])
    assert (scraped["distlaunch_attempt", ""], scraped["distlaunch_step", ""]) == (2, 30)
    assert (scraped["distlaunch_epochs_done", ""], scraped["distlaunch_value", "loss"]) == (3, 3.0)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = make_run(RunDir(tmp_path / "run"))
    start = TrainingStarted(**START, first_epoch=3, first_step=30)
    gpu = StepsTimed(**{**vars(timed(10, 2.0, 640)), "gpu_percent": 71.0, "gpu_memory_bytes": 5 << 30})
    restarted = TaskRestarted(restarted_task="worker:1", host="b", reason="killed")
    record(run.events, 2, "worker:0", start, TaskStarted(host="b", pid=1), ended(3, 2.5), done(41, 2.0), restarted, gpu)
    record(run.task(2, "worker:1").events, 2, "worker:1", timed(10, 4.0, 640))
    with run.lock():
        _, scraped = offer(run, Metrics.open("127.0.0.1:0", None), [])
    assert scraped["distlaunch_running", ""] == 1
    assert (scraped["distlaunch_step", ""], scraped["distlaunch_value", "loss"]) == (41, 2.0)
    assert scraped["distlaunch_gpu_utilization_percent", "worker:0"] == 71
    assert scraped["distlaunch_gpu_memory_bytes", "worker:0"] == 5 << 30
    assert scraped["distlaunch_examples_per_second", "worker:1"] == 160
    assert scraped["distlaunch_task_restarts_total", "worker:1"] == 1
    _, scraped = offer(run, Metrics.open("0", None), [])
    assert scraped["distlaunch_running", ""] == 0, "the launcher was killed"


def test_each_task_has_its_host(tmp_path: Path) -> None:
    run = make_run(RunDir(tmp_path / "run"))
    start = TrainingStarted(**START, first_epoch=3, first_step=30)
    record(run.events, 2, "worker:0", TaskStarted(host="a", pid=1), start, timed(10, 2.0, 640))
    record(run.task(2, "worker:1").events, 2, "worker:1", TaskStarted(host="b", pid=1), timed(10, 4.0, 640))
    samples = [sample for family in RunCollector(run).collect() for sample in family.samples]
    assert {(each.labels["task"], each.labels["host"]) for each in samples if "host" in each.labels} == {
        ("worker:0", "a"), ("worker:1", "b"),
    }  # fmt: skip


def test_places_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{port}: .*process {os.getpid()} "):
            Metrics.open(str(port), None)
    for wrong in ("http", "70000", "-1", "localhost:"):
        with pytest.raises(UsageError, match="expected a port"):
            Metrics.open(wrong, None)
    with pytest.raises(UsageError, match=r"reads only files whose names end with \.prom"):
        Metrics.open(None, str(tmp_path / "job.txt"))
    with pytest.raises(UsageError, match="there is no folder"):
        Metrics.open(None, str(tmp_path / "absent" / "job.prom"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'distlaunch\[metrics\]'"):
        Metrics.open("0", None)


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "job.prom").mkdir()
    said: list[str] = []
    has_said = threading.Event()

    def note(text: str) -> None:
        said.append(text)
        has_said.set()

    metrics = Metrics.open(None, str(tmp_path / "job.prom"))
    with offering_metrics(make_run(RunDir(tmp_path / "run")), metrics, os.environ, note):
        assert has_said.wait(30), "during the run"
        (tmp_path / "job.prom").rmdir()
    (warning,) = said
    assert re.fullmatch(r"warning: metrics: \S*job\.prom is not written: .*directory.*", warning)
    assert "distlaunch_step{" in (tmp_path / "job.prom").read_text(), "it is tried again"


def test_a_process_that_fails_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = Metrics.open(None, str(tmp_path / "job.prom"))
    run = make_run(RunDir(tmp_path / "run"))
    broken = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "prometheus_client.py").write_text("raise RuntimeError('broken')")
    with offering_metrics(run, metrics, broken, said.append):
        pass
    assert said == ["warning: metrics: RuntimeError: broken"]


def test_a_process_that_is_killed_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = Metrics.open(None, str(tmp_path / "job.prom"))
    with offering_metrics(make_run(RunDir(tmp_path / "run")), metrics, os.environ, said.append):
        (process,) = (each for each in psutil.Process().children() if "distlaunch.runs.metrics" in each.cmdline())
        process.kill()
    assert said == ["warning: metrics: exit code -9"]
