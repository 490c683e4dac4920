"""The output of commands for scripts: JSON, colours, widths, and completion in the shell."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from distlaunch.base.errors import ConfigError, ExitCode, Problem, UsageError, message_of, naming_run
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import EpochEnded, Evaluated, RunEnded
from distlaunch.base.run_dir import RunDir
from distlaunch.cli.main import cli
from distlaunch.cluster.hardware import Hardware
from distlaunch.cluster.settings import decide
from distlaunch.cluster.spec import Task
from distlaunch.engines.base import HostReport
from distlaunch.engines.host_warnings import hardware_differences
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.jobs.doctor import Examination
from distlaunch.plan.train import LaunchPlan, TaskPlan
from distlaunch.supervise.diagnose.exit_reason import Failure
from distlaunch.supervise.outcome import Outcome
from distlaunch.ui.console import JobConsole
from distlaunch.ui.progress.view import JsonView, QuietView, TextView, make_view, show


def invoke(*words: str, **env: str) -> Result:
    return CliRunner().invoke(cli, words, env=env)


@pytest.mark.parametrize("columns", [None, "0", "x", "-1"])
def test_a_width_of_nothing(columns: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    with (tmp_path / "out").open("w") as file:
        console = JobConsole(file=file)
        console.print("a word " * 50)
    assert (tmp_path / "out").read_text() == "a word " * 50 + "\n"


def test_colours_in_a_file_are_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert isinstance(make_view(), TextView)
    assert JobConsole().width > 1000


@pytest.mark.parametrize(("name", "number"), [("a", 1), ("net-50", 3)])
def test_the_first_and_the_last_event(name: str, number: int, tmp_path: Path, capsys) -> None:
    run = RunDir(tmp_path / (name if number == 1 else f"{name}-{number}"))
    run.path.mkdir()
    (run.path / "run.json").write_text(json.dumps({"name": name, "number": number}))
    plan = LaunchPlan(run.path, 0, "train", (), 0, 0)
    view = make_view(as_json=True, config="job.yaml")

    def work() -> None:
        view.started(plan)
        view.event(EpochEnded(epoch=0, step=4, seconds=1.0, logs={}))
        view.started(plan)  # of a restart

    assert show(view, work) == 0
    first, middle, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["event"], middle["event"], last["event"]) == ("CommandStarted", "EpochEnded", "CommandEnded")
    assert (first["run"], first["config"]) == (str(run.path), "job.yaml")
    assert (first["name"], first["number"]) == (name, number)
    assert (last["status"], last["exit_code"]) == ("done", 0)


def test_the_first_event_names_a_run_that_never_starts(capsys, tmp_path: Path, monkeypatch) -> None:
    """The first event names the run even if it never starts, for example because its hosts do not answer."""
    monkeypatch.chdir(tmp_path)
    view = JsonView("job.yaml")

    def work() -> None:
        view.begin(RunDir(tmp_path / "runs" / "net"))
        with naming_run("runs/net"):
            raise UsageError("no host")

    with pytest.raises(UsageError):
        show(view, work)
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["run"], last["reason"]) == (str(tmp_path / "runs" / "net"), "runs/net: no host")


def test_the_last_event_of_an_error(capsys) -> None:
    def work() -> None:
        raise UsageError("no")

    with pytest.raises(UsageError):
        show(JsonView("job.yaml"), work)
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["event"], first["config"]) == ("CommandStarted", "job.yaml")
    assert (last["status"], last["exit_code"]) == ("failed", ExitCode.USAGE)


def _failed(run: RunDir, mode: str = "train", failure: Failure | None = None, **outcome: object) -> AttemptResult:
    failure = failure or Failure("worker:0", "a", "ValueError: no", (), None, step=3)
    tasks = (TaskPlan(Task("worker", 0), ("x",), {}, run.task(0, "worker:0")),)
    plan = LaunchPlan(run.path, 0, mode, tasks, 0, 0)
    return AttemptResult(plan, Outcome("failed", ExitCode.FAILED, failure, **outcome))


def test_errors_name_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / "net-2")
    warned = replace(_failed(run).outcome, failure=None, warnings=("no room", "see runs/net-2/export", "runs/net-22"))
    for result, expected in (
        (_failed(run), ["runs/net-2 failed at step 3: ValueError: no"]),
        (_failed(run, "evaluate"), ["runs/net-2: evaluate failed at step 3: ValueError: no"]),
        (
            AttemptResult(_failed(run).plan, warned),
            ["warning: runs/net-2: no room", "warning: see runs/net-2/export", "warning: runs/net-2: runs/net-22"],
        ),
    ):
        show(QuietView(), lambda result=result: result)
        assert capsys.readouterr().err.lstrip().splitlines()[: len(expected)] == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UsageError("no host"), "runs/a: no host"),
        (UsageError("runs/a: no host"), "runs/a: no host"),
        (UsageError("runs/a-2: no host"), "runs/a: runs/a-2: no host"),
        (ConfigError([Problem(("x",), "one"), Problem(("y",), "two")]), "runs/a: x: one\nruns/a: y: two"),
        (OSError(28, "No space left on device", "/x"), "runs/a: No space left on device: /x"),
    ],
)
def test_an_error_names_the_run_of_its_block(error: UsageError | OSError, expected: str) -> None:
    with pytest.raises(type(error)) as caught, naming_run("runs/a"):
        raise error
    assert message_of(caught.value) == expected


def test_the_last_event_has_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "s3cret-value")
    run = RunDir(tmp_path / "runs" / "net")
    full = OSError(28, "No space left on device", "s3cret-value")
    for outcome, code, reason in (
        (_failed(run), 3, "runs/net failed at step 3: ValueError: no"),
        (_failed(run, "predict"), 3, "runs/net: predict failed at step 3: ValueError: no"),
        (UsageError("runs/net has no checkpoint"), 2, "runs/net has no checkpoint"),
        (full, 75, "No space left on device: ***"),
        (None, 0, ""),
    ):

        def work(outcome: Any = outcome) -> AttemptResult | None:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        view = JsonView("job.yaml")
        with contextlib.suppress(UsageError, OSError):
            show(view, work)
        out, err = capsys.readouterr()
        last = json.loads(out.splitlines()[-1])
        assert (last["event"], last["exit_code"], last["reason"]) == ("CommandEnded", code, reason)
        # of an error that is raised, `main` prints the same
        assert not isinstance(outcome, AttemptResult) or err.splitlines()[1] == reason


def test_messages_beside_events_name_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    view = JsonView("job.yaml")
    view.note("resuming runs/net")
    view.started(_failed(RunDir(tmp_path / "runs" / "net")).plan)
    view.note("restart 1 of 3")
    assert capsys.readouterr().err == "resuming runs/net\nruns/net: restart 1 of 3\n"


def test_no_runs_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("runs", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])
    assert isinstance(invoke("runs", "elsewhere", "--json").exception, UsageError)


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(config: str, overrides: object, machine: object, note: Callable[[str], None]) -> object:
        note("connecting")
        hosts = [
            HostReport(name, "", "3.11", {"keras": "3.9"}, 2, 100, [], driver, name, 10, hardware=hardware[name])
            for name, driver in (("a", "550.1"), ("b", "470.2"))
        ]
        return Examination(hosts, "5001, open to all", decide(hardware, {}), [*hardware_differences(hardware)])

    fast = Hardware("linux", "x86_64", "EPYC 9654", ("avx2", "avx512_vnni"), 4, 4, [0, 1, 2, 3])
    hardware = {"a": fast, "b": fast._replace(cpu="EPYC 7763", features=("avx2",), environ={"NPROC": "2"})}

    monkeypatch.setattr("distlaunch.jobs.doctor.examine", examine)
    found = json.loads(invoke("doctor", "job.yaml", "--json").stdout)
    assert [(host["name"], host["packages"], host["driver"]) for host in found["hosts"]] == [
        ("a", {"keras": "3.9"}, "550.1"),
        ("b", {"keras": "3.9"}, "470.2"),
    ]
    assert found["ports"] == "5001, open to all"
    assert len(found["warnings"]) == 1
    assert "550.1" in found["warnings"][0]
    assert [host["hardware"]["cpu"] for host in found["hosts"]] == ["EPYC 9654", "EPYC 7763"]
    assert [(row["name"], row["value"]) for row in found["settings"]] == [
        ("TF_ENABLE_ONEDNN_OPTS", "1"),
        ("NPROC", "2"),
    ]
    assert found["differences"] == [
        "hosts have different CPUs: EPYC 9654 on a; EPYC 7763 on b",
        "hosts have different features of the CPU: avx2, avx512_vnni on a; avx2 on b",
        "hosts have different values of NPROC in their environments: not set on a; 2 on b",
    ]
    told = invoke("doctor", "job.yaml").stdout
    assert "\nhosts have different CPUs: EPYC 9654 on a; EPYC 7763 on b\n" in told
    assert "\n  TF_ENABLE_ONEDNN_OPTS=1: the CPU of b has AVX2, for which" in told
    assert "\n  NPROC=2 on b: your environment sets it\n" in told


def _attempt(run: RunDir, number: int, mode: str) -> EventWriter:
    plan = {"mode": mode, "chief": "worker:0", "tasks": [{"task": "worker:0"}]}
    run.write_json(run.attempt_plan(number), plan)
    log = run.task(number, "worker:0").stdout_log
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"printed by attempt {number}\n")
    return EventWriter(run.events, attempt=number, task="worker:0")


def test_logs_show_training(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "job")
    run.path.mkdir()
    run.config.write_text("{}")
    first, second = _attempt(run, 0, "train"), _attempt(run, 1, "evaluate")
    first.write(RunEnded(status="done", step=8, epochs_done=2, seconds=1.0))
    second.write(Evaluated(step=8, split="validation", logs={"loss": 1.0}))
    _attempt(run, 2, "predict")  # which was killed
    # also while a launcher holds the run
    with run.lock():
        assert "printed by attempt 0" in invoke("logs", str(run.path)).output
    for words in ((), ("-f",)):
        text = invoke("logs", str(run.path), *words).output
        assert "printed by attempt 0" in text
        assert "killed" not in text
        assert "attempt 1" not in text
    assert "printed by attempt 1" in invoke("logs", str(run.path), "--attempt", "1").output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("train mi", ["file,mi"]),
        ("validate a.yaml mi", ["file,mi"]),
        ("evaluate runs/n", ["plain,runs/net", "plain,runs/net-50"]),
        ("stop ", ["plain,runs/net", "plain,runs/net-50", "plain,runs/other"]),
        ("logs elsewhere", ["dir,elsewhere"]),
        ("predict a --input rows", ["file,rows"]),
        ("runs r", ["dir,r"]),
        ("stop net-", ["plain,net-50"]),
    ],
)
def test_completion(words: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("net", "net-50", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs" / "none").mkdir()
    parts = words.split(" ")
    env = {"_DISTLAUNCH_COMPLETE": "bash_complete", "COMP_CWORD": str(len(parts))}
    env["COMP_WORDS"] = f"distlaunch {words}"
    result = CliRunner().invoke(cli, [], prog_name="distlaunch", env=env)
    assert result.output.splitlines() == offered
