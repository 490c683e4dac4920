"""Jobs that lose a task, as users run them, with a worker that only pretends."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from supervised import processes_of, wait_until
from test_commands import CONFIG, Shell

from distlaunch.base.event_files import read_events
from distlaunch.base.events import RunEnded, TaskFailed
from distlaunch.base.run_dir import RunDir

SERVERS = ["--set", "strategy.kind=parameter_server", "--set", "cluster.workers=2", "--set", "cluster.ps=1"]
EVALUATOR = ["--set", "cluster.evaluator=true"]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "job.yaml").write_text(CONFIG)
    (tmp_path / "m.py").write_text("def model():\n    pass\n\n\ndef data():\n    pass\n")
    return Shell(tmp_path)


def statuses(shell: Shell) -> list[str]:
    events = read_events(RunDir(shell.directory / "runs/job").events)
    return [event.status for event in events if isinstance(event, RunEnded)]


@pytest.mark.parametrize("victim", ["ps:0", "chief:0"])
def test_a_job_that_loses_a_task_goes_on(shell: Shell, victim: str, golden: Callable[[str, str], None]) -> None:
    code, out, err = shell("train", "job.yaml", *SERVERS, FAKE=f"kill={victim}")
    assert (code, err) == (0, "")
    assert statuses(shell) == ["failed", "done"]
    failed = [e for e in read_events(RunDir(shell.directory / "runs/job").events) if isinstance(e, TaskFailed)]
    assert [event.failed_task for event in failed] == [victim]
    first, second = (re.findall(r"127\.0\.0\.1:\d+", text) for text in plans(shell))
    assert first != second
    # output and events come by two ways, so which of them is shown first is chance
    changes = {
        r"\[chief:0\] hello.*\n": "",
        r"SIGKILL.*": "SIGKILL",
        r"stopping .*": "stopping ...",
        r"in \d+\.\d s": "in N s",
    }
    for pattern, instead in changes.items():
        out = re.sub(pattern, instead, out)
    golden(f"train/restart_{victim.partition(':')[0]}.txt", out)
    wait_until(lambda: not processes_of(shell.directory))


def plans(shell: Shell) -> list[str]:
    """Return the TF_CONFIG of each attempt, as its chief has recorded it."""
    return [path.read_text() for path in sorted((shell.directory / "runs/job/attempts").glob("*/tf_config.json"))]


def test_a_worker_that_is_killed_costs_nothing(shell: Shell) -> None:
    code, out, err = shell("train", "job.yaml", *SERVERS, FAKE="kill=worker:1")
    assert (code, err) == (0, "")
    assert "worker:1 was killed by SIGKILL; restarted" in out
    assert re.search(r"restarts +worker:1 twice", out)  # once in each of the two epochs
    assert statuses(shell) == ["done"]


def test_restarts_come_to_an_end(shell: Shell) -> None:
    code, out, err = shell("train", "job.yaml", *SERVERS, "--set", "restarts.max=2", FAKE="kill_always=chief:0")
    assert code == 75
    assert [line for line in out.splitlines() if line.startswith("restart ")][-1].startswith("restart 2 of 2: chief:0 ")
    assert "failed: chief:0" in err
    assert statuses(shell) == ["failed"] * 3


def test_no_restart_is_the_default_of_other_strategies(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", FAKE="kill=worker:0")[0] == 75
    assert shell("train", "job.yaml", "-q", "--set", "restarts.max=1", FAKE="kill=worker:0")[0] == 0


def test_no_restart_after_an_error_of_ones_own(shell: Shell) -> None:
    code, out, _ = shell("train", "job.yaml", *SERVERS, FAKE="fail")
    assert code == 3
    assert "restart" not in out
    assert statuses(shell) == ["failed"]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped")])
def test_a_signal_between_attempts_ends_the_job(shell: Shell, number: signal.Signals, expected: str) -> None:
    """The fake engine signals the launcher when an attempt has failed, before the next."""
    code, out, _ = shell("train", "job.yaml", *SERVERS, FAKE="kill=chief:0", FAKE_BETWEEN=str(int(number)))
    assert code == 4
    assert "restart " not in out
    assert RunDir(shell.directory / "runs/job").next_attempt() == 1
    assert statuses(shell) == ["failed", expected]


@pytest.mark.parametrize("more", [[], SERVERS], ids=["one_device", "parameter_server"])
def test_an_evaluator_beside_training(shell: Shell, more: list[str]) -> None:
    code, out, err = shell("train", "job.yaml", *more, *EVALUATOR)
    assert (code, err) == (0, "")
    assert "evaluator  step 8  loss 0.2500  accuracy 0.7500" in out
    assert statuses(shell) == ["done"]
    wait_until(lambda: not processes_of(shell.directory))


def test_an_evaluator_of_a_launcher_of_its_own(shell: Shell) -> None:
    """It evaluates the chief's run, whose lock the chief's launcher holds, and leaves its files as they are."""
    task = {"type": "evaluator", "index": 0}
    tf_config = json.dumps({"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": task})
    two = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2"]
    code, out, err = shell("train", "job.yaml", *two, TF_CONFIG=tf_config)
    assert (code, out) == (2, "")
    assert "there is no run called job in runs yet; start the chief first" in err
    assert shell("train", "job.yaml", "-q", *two)[0] == 0
    run = RunDir(shell.directory / "runs/job")
    before = run.events.read_bytes(), run.plan.read_bytes()
    with run.lock():
        code, out, err = shell("train", "job.yaml", *two, TF_CONFIG=tf_config)
    assert (code, err) == (0, "")
    assert "evaluator  step 8  loss 0.2500  accuracy 0.7500" in out
    assert (run.events.read_bytes(), run.plan.read_bytes()) == before
    assert (run.attempts(), [path.name for path in run.path.parent.iterdir()]) == ([0], ["job"])


def test_a_run_of_servers_is_evaluated(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", *SERVERS, *EVALUATOR)[0] == 0
    code, out, err = shell("evaluate", "runs/job")
    assert (code, err) == (0, "")
    assert "0.7500" in out
    wait_until(lambda: not processes_of(shell.directory))


def test_a_smoke_run_of_servers(shell: Shell) -> None:
    code, out, err = shell("train", "job.yaml", "--smoke", *SERVERS)
    assert (code, err) == (0, "")
    assert " no " not in out


WORKERS = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2"]
SOON = ["--set", "cluster.stall_timeout_s=3", "--set", "restarts.max=1", "--set", "cluster.stop_timeout_s=1"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("hang", "made no progress for 3 s (cluster.stall_timeout_s) after step 4 while the others waited for it"),
        ("freeze", "sent no heartbeat (its process is suspended, as by SIGSTOP) for 3 s"),
    ],
)
def test_who_holds_the_others_up_is_named_and_the_job_goes_on(shell: Shell, how: str, told: str) -> None:
    code, out, err = shell("train", "job.yaml", *WORKERS, *SOON, FAKE=f"{how}=worker:1")
    assert (code, err) == (0, ""), out
    assert f"restart 1 of 1: worker:1 {told}" in out, out
    assert statuses(shell)[-1] == "done"
    failed = [e for e in read_events(RunDir(shell.directory / "runs/job").events) if isinstance(e, TaskFailed)]
    assert [event.failed_task for event in failed] == ["worker:1"]
    error = json.loads(RunDir(shell.directory / "runs/job").task(0, "worker:1").error_json.read_text())
    assert (error["kind"], error["frozen"], error["step"]) == ("stall", how == "freeze", 4)
    log = RunDir(shell.directory / "runs/job").task(0, "worker:0").stderr_log.read_text()
    assert "hold_up" in log, "the stacks of those who wait are there too"
    wait_until(lambda: not processes_of(shell.directory))


def test_nobody_waits_for_the_only_task(shell: Shell) -> None:
    _, out, err = shell("train", "job.yaml", *SOON[:2], FAKE="hang=worker:0")
    assert "training has made no step for 3 s\n" in out
    assert "wait" not in out + err


def test_an_exception_that_comes_again_at_the_same_step_is_not_retried(shell: Shell) -> None:
    code, out, err = shell("train", "job.yaml", "--set", "restarts.max=5", FAKE="raise")
    assert code == 3
    assert [line[:14] for line in out.splitlines() if line.startswith("restart ")] == ["restart 1 of 5"]
    assert "the same exception at the same step twice in a row" in out
    assert statuses(shell) == ["failed"] * 2
    assert "failed at step 4: ValueError: boom" in err


@pytest.mark.parametrize(("how", "told"), [("exit", "ended with exit code 7"), ("crash", "killed by SIGSEGV")])
def test_an_end_that_comes_again_at_the_same_step_is_not_retried(shell: Shell, how: str, told: str) -> None:
    code, out, _ = shell("train", "job.yaml", "--set", "restarts.max=5", FAKE=how)
    assert code == 3
    assert f"restart 1 of 5: worker:0 {told}" in out
    assert "the same exit code at the same step twice in a row" in out
    assert statuses(shell) == ["failed"] * 2


def test_an_exit_code_that_passes_is_retried(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", "--set", "restarts.max=1", FAKE="exit_once")[0] == 0


IN_A_WHILE = ["--set", "restarts.max=1", "--set", "restarts.backoff_s=100"]


def test_an_exception_that_passes_is_retried_after_a_while(shell: Shell) -> None:
    settings = ["--set", "restarts.max=1", "--set", "restarts.backoff_s=0.2", "--set", "restarts.window_s=100"]
    code, out, _ = shell("train", "job.yaml", *settings, FAKE="raise_once")
    assert code == 0
    assert "restart 1 of 1 in 0.2 s: worker:0 ValueError: boom" in out


@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGINT, 4, "interrupted"), (signal.SIGTERM, 4, "stopped")]
)
def test_a_signal_while_it_waits_to_start_again_ends_the_job(
    shell: Shell, number: signal.Signals, code: int, status: str
) -> None:
    with shell.start("train", "job.yaml", *IN_A_WHILE, FAKE="raise_once") as process:
        assert process.stdout is not None
        assert any(line.startswith("restart 1 of 1 in 100 s") for line in process.stdout)
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == code
    assert rest.splitlines()[0] == f"stopping ({number.name})"
    run = RunDir(shell.directory / "runs/job")
    assert run.next_attempt() == 1
    ends = [event for event in read_events(run.events) if isinstance(event, RunEnded)]
    assert [(end.status, end.attempt, end.step) for end in ends] == [("failed", 0, 4), (status, 0, 4)]
    assert json.loads(shell("runs", "--json")[1])[0]["status"] == status
    assert json.loads(shell("report", "runs/job", "--json")[1])["status"] == status


def test_stop_while_it_waits_to_start_again(shell: Shell) -> None:
    with shell.start("train", "job.yaml", *IN_A_WHILE, FAKE="raise_once") as process:
        assert process.stdout is not None
        assert any(line.startswith("restart 1 of 1 in 100 s") for line in process.stdout)
        assert shell("stop", "runs/job")[1].startswith("runs/job: stopped at step 4\n")
        process.stdout.read()


def test_a_job_goes_on_with_fewer_workers_and_then_with_all(shell: Shell) -> None:
    """3 take over from 4, at the same global batch, which they cannot share equally."""
    span = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers={min: 1, max: 4}"]
    code, out, err = shell("train", "job.yaml", *span, FAKE="kill_always=worker:1")
    assert code == 75
    restarts = [line.partition(":")[0] for line in out.splitlines() if line.startswith("restart ")]
    assert restarts == [
        "restart 1 of 3, with 3 workers instead of 4",
        "restart 2 of 3, with 4 workers instead of 3",
        "restart 3 of 3, with 3 workers instead of 4",
    ]
    assert "failed: worker:1" in err
    run = RunDir(shell.directory / "runs/job")
    assert [len(run.tasks(attempt)) for attempt in run.attempts()] == [4, 3, 4, 3]
    assert "max: 4" in run.config.read_text(), "a run that is resumed may have all of them"
    assert "workers: 3" in run.attempt_config(1).read_text()


def test_a_killed_task_has_its_signal_in_error_json(shell: Shell) -> None:
    code, _, err = shell("train", "job.yaml", "-q", *WORKERS, FAKE="kill=worker:0")
    assert code == 75
    assert re.search(r"^runs/\S+ failed: worker:0 on \S+ at step 8: killed by SIGKILL", err, re.MULTILINE), err
    run = RunDir(shell.directory / "runs/job")
    error = json.loads(run.task(0, "worker:0").error_json.read_text())
    assert (error["kind"], error["signal"], error["step"]) == ("signal", "SIGKILL", 8)


def test_a_task_that_ends_without_a_word_has_its_exit_code_in_error_json(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", FAKE="exit")[0] == 3
    error = json.loads(RunDir(shell.directory / "runs/job").task(0, "worker:0").error_json.read_text())
    assert (error["kind"], error["code"], error["step"]) == ("exit", 7, 4)
