"""Parameter servers and the evaluator under the real supervisor: who is started again, and who ends when."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from supervised import Recorder, make_servers_plan, supervise

from distlaunch.base.errors import ExitCode
from distlaunch.base.event_files import read_events
from distlaunch.base.events import Evaluated, RunEnded, TaskRestarted
from distlaunch.base.run_dir import RunDir

SERVE = ["serve"]
LONG = ["train", "hang"]


def killer(run_dir: Path, *marks: str, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Kills each process once, as soon as it has left its mark."""
    left = list(marks)

    def look() -> None:
        for mark in [mark for mark in left if (run_dir / mark).exists()]:
            left.remove(mark)
            os.kill(int((run_dir / mark).read_text()), number)

    return look


def restarts(run_dir: Path) -> list[tuple[str, str, str]]:
    events = read_events(RunDir(run_dir).events)
    return [(event.restarted_task, event.host, event.reason) for event in events if isinstance(event, TaskRestarted)]


def test_a_worker_that_is_killed_is_started_again_each_time(run_dir: Path) -> None:
    kill = killer(run_dir, *(f"serving-worker:1-{number}" for number in (1, 2, 3)))
    recorder = Recorder(on_tick=kill)
    chief = ["train", "wait_for=serving-worker:1-4", "finish"]
    plan = make_servers_plan(run_dir, chief_0=chief, worker_0=SERVE, worker_1=["say=here", *SERVE], ps_0=SERVE)
    outcome = supervise(plan, recorder)
    assert (outcome.status, outcome.exit_code, outcome.warnings) == ("done", ExitCode.DONE, ())
    assert restarts(run_dir) == [("worker:1", "host-1", "was killed by SIGKILL")] * 3
    assert [event for event in recorder.events if isinstance(event, TaskRestarted)]
    assert RunDir(run_dir).task(0, "worker:1").stdout_log.read_text() == "here\n" * 4
    assert all((run_dir / f"ended-{task}").exists() for task in ("worker:0", "worker:1", "ps:0"))


def test_an_old_error_is_set_aside(run_dir: Path) -> None:
    once = ["come", "error=UnavailableError=gone", "mark=noticed", "quiet_exit=3"]
    plan = make_servers_plan(run_dir, chief_0=["train", "wait_for=noticed", "wait_for=noticed-2", "finish"],
                             worker_0=[*once], ps_0=SERVE)  # fmt: skip
    files = RunDir(run_dir).task(0, "worker:0")

    def look() -> None:
        if (files.path / "error-2.json").exists():
            (run_dir / "noticed-2").touch()

    outcome = supervise(plan, Recorder(on_tick=look))
    assert outcome.status == "done"
    assert restarts(run_dir)[0][2] == "ended with exit code 3 (UnavailableError: gone)"


def test_a_worker_that_never_comes_up_fails_the_run(run_dir: Path) -> None:
    plan = make_servers_plan(run_dir, chief_0=LONG, worker_0=["die"], ps_0=SERVE)
    outcome = supervise(plan)
    assert (outcome.status, outcome.retryable) == ("failed", False)
    assert outcome.failure is not None
    assert outcome.failure.task == "worker:0"
    assert outcome.failure.reason.startswith(
        "ended 3 times in a row before it was up; the last time: killed by SIGKILL"
    )
    assert len(restarts(run_dir)) == 2


def test_a_worker_that_raises_fails_the_run_at_once(run_dir: Path) -> None:
    plan = make_servers_plan(
        run_dir, chief_0=LONG, worker_0=["come", "error=ValueError=bad", "quiet_exit=3"], ps_0=SERVE
    )
    outcome = supervise(plan)
    assert outcome.failure is not None
    assert (outcome.failure.task, outcome.failure.reason) == ("worker:0", "ValueError: bad")
    assert (outcome.retryable, restarts(run_dir)) == (False, [])


def test_a_ps_that_is_killed_is_named(run_dir: Path) -> None:
    chief = ["train", "wait_gone=serving-ps:0-1", "error=UnavailableError=Socket closed", "quiet_exit=3"]
    recorder = Recorder(on_tick=killer(run_dir, "serving-ps:0-1"))
    outcome = supervise(make_servers_plan(run_dir, chief_0=chief, worker_0=SERVE, ps_0=SERVE), recorder)
    assert outcome.failure is not None
    assert outcome.failure.task == "ps:0"
    assert outcome.failure.reason.startswith("killed by SIGKILL")
    assert outcome.retryable


def test_servers_outlive_the_chief_when_all_are_stopped(run_dir: Path) -> None:
    asked: list[bool] = []

    def look() -> None:
        serving = all((run_dir / f"serving-{task}-1").exists() for task in ("worker:0", "ps:0"))
        if serving and (run_dir / "hanging-0").exists() and not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    plan = make_servers_plan(run_dir, chief_0=["stop_cleanly"], worker_0=SERVE, ps_0=SERVE)
    outcome = supervise(plan, Recorder(on_tick=look))
    assert (outcome.status, outcome.exit_code) == ("stopped", ExitCode.PREEMPTED)
    stopped_at = (run_dir / "stopped-0").stat().st_mtime_ns
    assert all((run_dir / f"ended-{task}").stat().st_mtime_ns > stopped_at for task in ("worker:0", "ps:0"))


def test_an_evaluator_is_started_again_and_never_fails_the_run(run_dir: Path) -> None:
    recorder = Recorder(on_tick=killer(run_dir, "serving-evaluator:0-1"))
    chief = ["train", "wait_for=serving-evaluator:0-2", "finish"]
    plan = make_servers_plan(run_dir, start_timeout_s=2, chief_0=chief, evaluator_0=["evaluate=3", *SERVE])
    outcome = supervise(plan, recorder)
    assert outcome.status == "done"
    assert restarts(run_dir) == [("evaluator:0", "host-0", "was killed by SIGKILL")]
    assert [event.step for event in recorder.events if isinstance(event, Evaluated)] == [3, 3]
    assert outcome.warnings[0].startswith(
        "evaluator:0 was stopped because it reported nothing new for 2 s after the end of the run"
    )


def test_an_evaluator_that_raises_is_given_up(run_dir: Path) -> None:
    recorder = Recorder()
    chief = ["train", "wait_for=given-up", "finish"]

    def look() -> None:
        if any("continuing without it" in note for note in recorder.notes):
            (run_dir / "given-up").touch()

    recorder.on_tick = look
    broken = ["come", "error=ValueError=bad", "quiet_exit=3"]
    outcome = supervise(make_servers_plan(run_dir, chief_0=chief, evaluator_0=broken), recorder)
    assert (outcome.status, restarts(run_dir)) == ("done", [])
    assert recorder.notes == ["evaluator:0 ended with exit code 3 (ValueError: bad); continuing without it"]
    assert outcome.warnings[0].startswith("evaluator:0 failed and was not restarted")


def test_the_evaluator_is_waited_for(run_dir: Path) -> None:
    recorder = Recorder()
    recorder.on_tick = lambda: (run_dir / "told").touch() if recorder.notes else None
    chief = ["train", "wait_for=evaluating", "finish"]
    evaluator = ["come", "mark=evaluating", "wait_for=told", "evaluate=8"]
    outcome = supervise(make_servers_plan(run_dir, chief_0=chief, worker_0=SERVE, evaluator_0=evaluator), recorder)
    assert (outcome.status, outcome.warnings) == ("done", ())
    assert recorder.notes == ["the run is done; waiting for evaluator:0 to evaluate its last checkpoint"]
    assert [event.step for event in recorder.events if isinstance(event, Evaluated)] == [8]


@pytest.mark.parametrize(("job", "again"), [("worker_0", 1), ("ps_0", 0)])
def test_a_server_that_is_started_alone(run_dir: Path, job: str, again: int) -> None:
    """Exit code 0 is a success; a killed worker is started again, but a killed ps has lost its variables."""
    name = job.replace("_", ":")
    recorder = Recorder(on_tick=killer(run_dir, f"serving-{name}-1"))
    recorder.on_tick = both(recorder.on_tick, killer(run_dir, f"serving-{name}-2", number=signal.SIGTERM))
    plan = make_servers_plan(run_dir, **{job: SERVE})
    outcome = supervise(dataclasses.replace(plan, elsewhere={"chief:0": "a:1"}), recorder)
    assert outcome.status == ("done" if again else "failed")
    assert len(restarts(run_dir)) == again
    assert not outcome.retryable
    ends = [event for event in read_events(RunDir(run_dir).events) if isinstance(event, RunEnded)]
    assert [event.status for event in ends] == [outcome.status]


def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
