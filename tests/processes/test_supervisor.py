"""Tasks that misbehave in every way, under the real supervisor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from supervised import Recorder, make_plan, supervise

from distlaunch.base.errors import ExitCode, Problem
from distlaunch.base.event_files import read_events
from distlaunch.base.events import RunEnded, TaskFailed
from distlaunch.base.run_dir import RunDir

GOOD = ["train", "wait_for=training-1", "finish"]
PEER = ["train", "hang"]


def test_all_done(run_dir: Path) -> None:
    outcome = supervise(make_plan(run_dir, GOOD, ["train", "finish"]))
    assert (outcome.status, outcome.exit_code, outcome.failure) == ("done", ExitCode.DONE, None)
    ends = [event for event in read_events(RunDir(run_dir).events) if isinstance(event, RunEnded)]
    assert [(end.task, end.status) for end in ends] == [("worker:0", "done")]


@pytest.mark.parametrize(
    ("culprit", "expected"),
    [
        (["train", "wait_for=hanging-0", "quiet_exit=1"], "ended with exit code 1"),
        (["train", "wait_for=hanging-0", "quiet_exit"], "ended with exit code 0 before training was done"),
        (["train", "wait_for=hanging-0", "die=9"], "killed by SIGKILL"),
        (["train", "wait_for=hanging-0", "die=11"], "killed by SIGSEGV"),
        (["train", "wait_for=hanging-0", "error=ValueError=bad shape", "quiet_exit=3"], "ValueError: bad shape"),
    ],
)
def test_first_failure_is_named(run_dir: Path, culprit: list[str], expected: str) -> None:
    outcome = supervise(make_plan(run_dir, PEER, culprit))
    code = ExitCode.TEMPORARY if expected == "killed by SIGKILL" else ExitCode.FAILED
    assert (outcome.status, outcome.exit_code) == ("failed", code)
    assert outcome.failure is not None
    assert (outcome.failure.task, outcome.failure.host) == ("worker:1", "host-1")
    assert outcome.failure.reason.startswith(expected)
    assert outcome.failure.log == RunDir(run_dir).task(0, "worker:1").stderr_log
    failed, ended = read_events(RunDir(run_dir).events)[-2:]
    assert isinstance(failed, TaskFailed)
    assert (failed.failed_task, failed.reason) == ("worker:1", outcome.failure.reason)
    assert isinstance(ended, RunEnded)
    assert (ended.status, ended.step, ended.logs) == ("failed", 3, {"loss": 0.5})


def test_the_end_is_at_the_last_step_that_was_done(run_dir: Path) -> None:
    """Events tell steps twice a second."""
    supervise(make_plan(run_dir, ["train", "pulse=20", "quiet_exit=1"]))
    assert [event.step for event in read_events(RunDir(run_dir).events) if isinstance(event, RunEnded)] == [20]


def test_the_traceback_is_shown(run_dir: Path) -> None:
    outcome = supervise(make_plan(run_dir, ["train", "error=KeyError=x", "quiet_exit=3"]))
    assert outcome.failure is not None
    assert outcome.failure.detail[-1] == "KeyError: x"


def test_without_error_json_the_end_of_the_log_is_shown(run_dir: Path) -> None:
    noise = "I0000 00:00:1.5  12 x.cc:1] hello"
    outcome = supervise(make_plan(run_dir, ["say_error=ImportError: no module", f"say_error={noise}", "quiet_exit=1"]))
    assert outcome.failure is not None
    assert outcome.failure.detail == ("ImportError: no module",)


def test_a_consequence_is_not_the_cause(run_dir: Path) -> None:
    """The peer's error comes out first; the task that it complains about dies a moment later."""
    first = ["train", "error=UnavailableError=Socket closed", "mark=noticed", "quiet_exit=3"]
    second = ["train", "wait_for=noticed", "error=ValueError=real", "quiet_exit=3"]
    outcome = supervise(make_plan(run_dir, first, second))
    assert outcome.failure is not None
    assert (outcome.failure.task, outcome.failure.reason) == ("worker:1", "ValueError: real")


def test_a_suspended_peer_is_named(run_dir: Path) -> None:
    complains = ["train", "wait_for=training-1", "error=DeadlineExceededError=heartbeat", "quiet_exit=3"]
    outcome = supervise(make_plan(run_dir, complains, ["train", "die=19"], stop_timeout_s=0.3))
    assert outcome.failure is not None
    assert outcome.failure.task == "worker:1"
    assert "stopped answering (its process is suspended" in outcome.failure.reason
    assert "worker:0 noticed" in outcome.failure.reason


def test_a_peer_of_another_launcher_is_named(run_dir: Path) -> None:
    plan = make_plan(run_dir, ["train", "error=UnavailableError=Socket closed", "quiet_exit=3"])
    one, two = {"worker:1": "b:1"}, {"worker:1": "b:1", "worker:2": "c:1"}
    outcome = supervise(dataclasses.replace(plan, elsewhere=one))
    assert outcome.failure is not None
    assert outcome.failure.reason == (
        "worker:1 at b:1, a task of another launcher, is gone; worker:0 noticed it: UnavailableError: Socket closed"
    )
    assert outcome.failure.detail == ()
    outcome = supervise(dataclasses.replace(plan, elsewhere=two))
    assert outcome.failure is not None
    assert outcome.failure.reason.startswith("a task of another launcher is gone: worker:1 at b:1 or worker:2 at c:1; ")


def test_config_problems_are_collected_once(run_dir: Path) -> None:
    wrong = ["come", "config_error=model.args=got 'x'", "quiet_exit=2"]
    outcome = supervise(make_plan(run_dir, wrong, wrong))
    assert outcome.exit_code == ExitCode.USAGE
    assert outcome.problems == (Problem(("model", "args"), "got 'x'"),)


def test_a_program_that_is_not_there(run_dir: Path) -> None:
    plan = make_plan(run_dir, ["hang"], ["hang"])
    bad = plan.tasks[1]
    broken = type(bad)(bad.task, ("/no/such/program",), bad.env, bad.files)
    outcome = supervise(type(plan)(run_dir, 0, "train", (plan.tasks[0], broken), 30, 10))
    assert outcome.failure is not None
    assert outcome.failure.task == "worker:1"
    assert "could not be started: No such file or directory (/no/such/program)" in outcome.failure.reason


def test_start_deadline_names_who_has_not_come(run_dir: Path) -> None:
    plan = make_plan(run_dir, ["come", "ignore_sigterm", "hang"], ["hang"], start_timeout_s=2, stop_timeout_s=0.5)
    outcome = supervise(plan)
    assert outcome.exit_code == ExitCode.TEMPORARY
    assert outcome.failure is not None
    assert outcome.failure.task == "worker:1"
    assert outcome.failure.reason.startswith("worker:1 (127.0.0.1:1001) did not come up within 2 s")


def test_start_deadline_when_all_have_come(run_dir: Path) -> None:
    recorder = Recorder()
    say = ["come", "handle_dump", "hang"]
    outcome = supervise(make_plan(run_dir, say, say, start_timeout_s=2, stop_timeout_s=0.5), recorder)
    assert outcome.failure is not None
    assert outcome.failure.reason.startswith("every task came up, but the first step did not begin within 2 s")
    assert outcome.failure.detail == ()
    assert recorder.lines == []
    assert "in hang" in RunDir(run_dir).task(0, "worker:1").stderr_log.read_text()


def test_who_ignores_sigterm_is_killed_and_so_are_grandchildren(run_dir: Path) -> None:
    stubborn = ["ignore_sigterm", "fork_stubborn", "train", "hang"]
    outcome = supervise(make_plan(run_dir, stubborn, ["train", "wait_for=hanging-0", "die"], stop_timeout_s=0.5))
    assert outcome.failure is not None
    assert outcome.failure.task == "worker:1"


def test_a_grandchild_does_not_outlive_a_task_that_is_done(run_dir: Path) -> None:
    outcome = supervise(make_plan(run_dir, ["train", "fork_stubborn", "finish"]))
    assert outcome.status == "done"


def test_a_task_that_lingers_after_the_end_is_ended(run_dir: Path) -> None:
    outcome = supervise(make_plan(run_dir, GOOD, ["train", "ignore_sigterm", "hang"], stop_timeout_s=0.3))
    assert (outcome.status, outcome.exit_code) == ("done", ExitCode.DONE)
    assert outcome.warnings == ("worker:1 did not exit in time and was killed",)


def test_a_crash_after_the_end_is_a_warning(run_dir: Path) -> None:
    second = ["train", "finish", "wait_for=ended", "die=6"]
    outcome = supervise(make_plan(run_dir, [*GOOD, "mark=ended"], second))
    assert outcome.status == "done"
    assert outcome.warnings[0].startswith("worker:1 failed after the run was done")


def test_a_clean_stop_asked_by_someone_else(run_dir: Path) -> None:
    outcome = supervise(make_plan(run_dir, ["train", "finish=stopped", "quiet_exit=4"], ["train", "quiet_exit=4"]))
    assert (outcome.status, outcome.exit_code) == ("stopped", ExitCode.PREEMPTED)


def test_evaluation_needs_no_end_event(run_dir: Path) -> None:
    outcome = supervise(make_plan(run_dir, ["come"], ["come"], mode="evaluate"))
    assert outcome.exit_code == ExitCode.DONE
    assert not any(isinstance(event, RunEnded) for event in read_events(RunDir(run_dir).events))


def test_a_flood_neither_slows_others_nor_loses_a_byte(run_dir: Path) -> None:
    recorder = Recorder()
    flooding = ["train", "flood=200", "finish"]  # until the other has trained, which it begins in the midst of it
    plan = make_plan(run_dir, flooding, ["wait_for=flooding", "train", "mark=trained", "finish"])
    log = RunDir(run_dir).task(0, "worker:0").stdout_log

    def look() -> None:
        if log.exists() and log.stat().st_size > 20_000_000:
            (run_dir / "flooding").touch()

    recorder.on_tick = look
    assert supervise(plan, recorder).status == "done"
    written = int((run_dir / "flooded").read_text())
    assert log.stat().st_size == written >= 200_000_000
    shown = [text for task, text in recorder.lines if task == "worker:0"]
    assert 100 < len(shown) < written / 20_000
    assert any("lines are only in" in text for text in shown)


def test_lines_reach_the_screen_whole_and_the_log_unchanged(run_dir: Path) -> None:
    recorder = Recorder()
    say = ["train", r"say=one\rtwo", "say=I0000 00:00:1.5  12 x.cc:1] noise", "say=no newline=", "finish"]
    supervise(make_plan(run_dir, say), recorder)
    assert recorder.lines == [("worker:0", "two"), ("worker:0", "no newline")]
    log = RunDir(run_dir).task(0, "worker:0").stdout_log.read_bytes()
    assert log == b"one\rtwo\nI0000 00:00:1.5  12 x.cc:1] noise\nno newline"


def test_closing_stdout_is_not_ending(run_dir: Path) -> None:
    assert supervise(make_plan(run_dir, ["train", "close_stdout", "finish", "quiet_exit=0"])).status == "done"


def test_an_observer_that_breaks_does_not_break_the_job(run_dir: Path) -> None:
    recorder = Recorder()

    def fail() -> None:
        raise BrokenPipeError

    recorder.on_tick = fail
    assert supervise(make_plan(run_dir, ["train", "finish"]), recorder).status == "done"


def test_nothing_is_left_when_the_launcher_itself_fails(run_dir: Path) -> None:
    recorder = Recorder()

    def fail() -> None:
        if (run_dir / "hanging-0").exists():
            raise RuntimeError("bug")

    recorder.on_tick = fail
    with pytest.raises(RuntimeError):
        supervise(make_plan(run_dir, PEER, PEER), recorder)
