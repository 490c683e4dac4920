"""Exit codes that a loop can trust: each end of a job has its class."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from distlaunch.agent.messages import Exit
from distlaunch.base.errors import (
    MEANINGS,
    CheckpointError,
    DataError,
    DistlaunchError,
    ExitCode,
    HostsError,
    Problem,
    RunBusyError,
    UsageError,
    code_of_os_error,
)
from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import Event, Exported, ExportFailed, JobFailed, RunEnded, TaskStarted, TrainingStarted
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import Submission
from distlaunch.base.run_files.task_error import write_exception, write_lost, write_problems
from distlaunch.cli.exit_codes import CODES
from distlaunch.cli.main import COMMANDS, cli
from distlaunch.engines.remote.answers import raise_for
from distlaunch.engines.remote.ssh_errors import explain
from distlaunch.jobs.attempt import AttemptResult
from distlaunch.jobs.temporary_failures import limit_temporary_failures, limiting_temporary_errors
from distlaunch.jobs.wait import wait_for_runs
from distlaunch.plan.train import Mode
from distlaunch.runs.final_code import final_code, worst_code
from distlaunch.supervise.observer import Silent
from distlaunch.supervise.outcome import Outcome
from distlaunch.supervise.supervisor import Supervisor
from tests.unit.memory_engine import Clock, MemoryAllocation, Script, Signals, plan_of
from tests.unit.test_supervisor_in_memory import CHIEF, CHIEF_DONE, OTHER, PEER_DONE, SERVERS, TRAINS, UP

DONE, USAGE, FAILED, STOPPED, TEMPORARY = 0, 2, 3, 4, 75
Report = Callable[[RunDir], None]


@dataclass
class End:
    """A job of tasks in memory, and the exit code that it must have.

    Attributes:
        reports: what a task writes about its failure, and when.
        oom: whether the kernel has killed for memory.
        elsewhere: tasks that other launchers have started.
        mode: of the attempt.
    """

    code: int
    scripts: dict[str, list[Script]]
    reports: tuple[tuple[float, Report], ...] = ()
    oom: bool | None = False
    signals: tuple[tuple[float, signal.Signals], ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    mode: Mode = "train"


def raises(error: BaseException, task: str = OTHER, *, step: int | None = 40) -> Report:
    own = isinstance(error, DistlaunchError)
    return lambda run: write_exception(run.task(0, task), error, step=step, user_error=own)


def named(name: str, text: str) -> Exception:
    return type(name, (Exception,), {})(text)


def ending(code: int, at: float = 50, **more: Any) -> dict[str, list[Script]]:
    """Return two tasks that train, of which the second ends with a code."""
    return {CHIEF: [Script([UP, TRAINS], on_stop=None)], OTHER: [Script([UP], ends=(at, code), **more)]}


def failing(error: BaseException, code: int = 3) -> dict[str, Any]:
    return {"scripts": ending(code), "reports": ((49.9, raises(error)),)}


TRAINING: dict[str, list[Script]] = {CHIEF: [Script([UP, TRAINS])], OTHER: [Script([UP])]}
GONE = named("UnavailableError", "Socket closed")
UNHEARD = named("UnavailableError", "worker:0 has stopped sending heartbeats")
ELSEWHERE = (1.0, TaskStarted(host="there", pid=2))
ENDS = {
    "done": End(DONE, {CHIEF: [CHIEF_DONE], OTHER: [PEER_DONE]}),
    "SIGTERM to the launcher": End(STOPPED, TRAINING, signals=((50, signal.SIGTERM),)),
    "Ctrl-C": End(STOPPED, TRAINING, signals=((50, signal.SIGINT),)),
    "Ctrl-C before a step": End(STOPPED, {CHIEF: [Script([UP])], OTHER: [Script()]}, signals=((5, signal.SIGINT),)),
    "SIGHUP before a step": End(STOPPED, {CHIEF: [Script([UP])], OTHER: [Script()]}, signals=((5, signal.SIGHUP),)),
    **{
        f"killed by {number.name}": End(TEMPORARY, ending(-number))
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
                       signal.SIGQUIT, signal.SIGPWR)
    },
    "killed, who knows by whom": End(TEMPORARY, ending(-9), oom=None),
    "killed before the first step": End(TEMPORARY, {CHIEF: [Script([UP])], OTHER: [Script([UP], ends=(5, -9))]}),
    "killed through a shell": End(TEMPORARY, ending(128 + signal.SIGKILL)),
    "the kernel ran out of memory": End(FAILED, ending(-9), oom=True),
    "the same through a shell": End(FAILED, ending(137), oom=True),
    **{
        f"crashed by {number.name}": End(FAILED, ending(-number))
        for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS,
                       signal.SIGXCPU, signal.SIGXFSZ)
    },
    "a parameter server is killed": End(
        TEMPORARY,
        {
            "chief:0": [Script([UP, TRAINS])], OTHER: [Script([UP], on_stop=0)], "ps:0": [Script([UP], ends=(50, -9))]
        },
        plan=SERVERS,
    ),
    "a server that never comes up": End(
        FAILED,
        {"chief:0": [Script([UP, TRAINS])], OTHER: [Script(ends=(3, 1))], "ps:0": [Script([UP], on_stop=0)]},
        plan=SERVERS,
    ),
    "an exit by itself": End(FAILED, ending(7)),
    "an exit with code 0 too early": End(FAILED, ending(0)),
    "a preemption reported by TensorFlow": End(TEMPORARY, ending(42)),
    "an exception": End(FAILED, **failing(ValueError("no"))),
    "an exception before the first step": End(
        FAILED,
        {CHIEF: [Script([UP])], OTHER: [Script([UP], ends=(5, 3))]},
        ((4.9, raises(ValueError("no"), step=None)),),
    ),
    "a mistake in the config": End(FAILED, **failing(KeyError("units"))),
    "a loss that is not finite": End(FAILED, **failing(named("NonFiniteError", "the loss of step 40 is nan"))),
    "no memory": End(FAILED, **failing(MemoryError())),
    "a device without memory": End(FAILED, **failing(named("ResourceExhaustedError", "OOM when allocating"))),
    **{
        f"a disk: {errno.errorcode[number]}": End(TEMPORARY, **failing(OSError(number, os.strerror(number), "a"), 75))
        for number in (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO)
    },
    "a disk without room for the report": End(TEMPORARY, ending(75)),
    "a disk that TensorFlow writes to": End(
        TEMPORARY, **failing(named("ResourceExhaustedError", "a.index; No space left on device"))
    ),
    "the last checkpoint": End(
        TEMPORARY, **failing(named("CheckpointWriteError", "cannot be written: [Errno 28] No space left on device"))
    ),
    "a checkpoint that may not be written": End(
        FAILED, **failing(named("CheckpointWriteError", "cannot be written: [Errno 13] Permission denied"))
    ),
    "a file that is not there": End(FAILED, **failing(FileNotFoundError(2, "No such file or directory", "a.csv"))),
    "text of a user that names a disk": End(FAILED, **failing(ValueError("No space left on device"))),
    "a host is lost": End(
        TEMPORARY, ending(-9), ((49.9, lambda run: write_lost(run.task(0, OTHER), "the host b is lost", 40, "b")),)
    ),
    "a task that never came up": End(TEMPORARY, {CHIEF: [Script([UP])], OTHER: [Script()]}),
    "all came up, and none reached a step": End(FAILED, {CHIEF: [Script([UP])], OTHER: [Script([UP])]}),
    "suspended by somebody": End(
        TEMPORARY, {CHIEF: [Script([UP, TRAINS])], OTHER: [Script([UP], beats_until=40, on_stop=None)]}
    ),
    "a peer is gone, nobody knows why": End(FAILED, ending(3), ((49.9, raises(GONE)),)),
    "asked to end through a shell": End(TEMPORARY, ending(128 + signal.SIGTERM)),
    "a crash through a shell": End(FAILED, ending(128 + signal.SIGSEGV)),
    "a program that is not found": End(FAILED, ending(127)),
    "an exception, then killed": End(FAILED, **failing(ValueError("no"), -9)),
    "an import": End(FAILED, **failing(ModuleNotFoundError("No module named 'x'"))),
    "data that has changed": End(FAILED, **failing(DataError("the data is not what it was"))),
    "a damaged checkpoint": End(FAILED, **failing(CheckpointError("no good checkpoint is left"))),
    "a mistake in the config that shows when things are built": End(
        USAGE,
        {CHIEF: [Script([UP])], OTHER: [Script([UP], ends=(5, 2))]},
        ((4.9, lambda run: write_problems(run.task(0, OTHER), [Problem(("model",), "no")])),),
    ),
    "a step that hangs": End(
        FAILED, {CHIEF: [Script([UP, TRAINS], works_until=21)], OTHER: [Script([UP], works_until=20)]}
    ),
    "all wait for each other": End(
        FAILED, {CHIEF: [Script([UP, TRAINS], works_until=20)], OTHER: [Script([UP], works_until=20)]}
    ),
    "held by native code": End(
        FAILED,
        {CHIEF: [Script([UP, TRAINS])], OTHER: [Script([UP], beats_until=40, suspended=False, on_stop=None)]},
    ),
    "a peer was done too early": End(
        FAILED, {CHIEF: [Script([UP, TRAINS], ends=(50, 3))], OTHER: [Script([UP], ends=(48, 0))]},
        ((49.9, raises(GONE, CHIEF)),),
    ),
    "a peer that somebody has suspended": End(
        TEMPORARY,
        {CHIEF: [Script([UP, TRAINS], on_stop=None, beats_until=20)], OTHER: [Script([UP], ends=(30, 3))]},
        ((29.9, raises(GONE)),),
    ),
    "a peer on another host is not heard": End(
        TEMPORARY,
        {CHIEF: [Script([UP, TRAINS], on_stop=None)], OTHER: [Script([ELSEWHERE], ends=(30, 3))]},
        ((29.9, raises(UNHEARD)),),
    ),
    "a peer on the same host is not heard": End(
        FAILED,
        {CHIEF: [Script([UP, TRAINS], on_stop=None)], OTHER: [Script([UP], ends=(30, 3))]},
        ((29.9, raises(UNHEARD)),),
    ),
    "two hosts do not hear each other": End(
        TEMPORARY,
        {CHIEF: [Script([UP, TRAINS], ends=(30.1, 3))], OTHER: [Script([ELSEWHERE], ends=(30, 3))]},
        ((29.8, raises(UNHEARD, CHIEF)), (29.9, raises(UNHEARD))),
    ),
    "a task of another launcher is gone": End(
        TEMPORARY, {CHIEF: [Script([UP, TRAINS], ends=(50, 3))]}, ((49.9, raises(GONE, CHIEF)),),
        elsewhere={OTHER: "b:1"},
    ),
    "a task of another launcher never came": End(TEMPORARY, {CHIEF: [Script([UP])]}, elsewhere={OTHER: "b:1"}),
    "an exception beside tasks of other launchers": End(
        FAILED, {CHIEF: [Script([UP, TRAINS], ends=(50, 3))]}, ((49.9, raises(ValueError("no"), CHIEF)),),
        elsewhere={OTHER: "b:1"},
    ),
    **{
        f"a script that ends with {code}": End(expected, {CHIEF: [Script([UP], ends=(50, code))]}, mode="run")
        for code, expected in ((1, FAILED), (2, FAILED), (3, FAILED), (75, TEMPORARY), (-9, TEMPORARY), (0, DONE))
    },
    "does not stop in time": End(
        FAILED, {CHIEF: [Script([UP, TRAINS], on_stop=None)], OTHER: [Script([UP])]}, signals=((50, signal.SIGTERM),)
    ),
    "a program that is not there": End(FAILED, {CHIEF: [Script([UP])], OTHER: [Script(cannot_start=True)]}),
}  # fmt: skip


def play(folder: Path, end: End, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    from tests.unit import memory_engine

    monkeypatch.setattr(memory_engine, "Exit", lambda code, oom: Exit(code, oom=end.oom))
    clock, run = Clock(), RunDir(folder)
    for at, report in end.reports:
        clock.at(at, lambda report=report: report(run))
    allocation = MemoryAllocation(run, clock, end.scripts, Signals(clock, *end.signals))
    plan = plan_of(folder, *end.scripts, **end.plan)
    tasks = tuple(replace(task, address=f"{task.task}:1") for task in plan.tasks)
    plan = replace(plan, tasks=tasks, elsewhere=end.elsewhere, mode=end.mode)
    return Supervisor(plan, allocation, Silent(), clock=clock, signals=allocation.signals).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ENDS)
def test_the_code_of_each_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    outcome = play(tmp_path, ENDS[name], monkeypatch)
    assert outcome.exit_code == ENDS[name].code, outcome


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_commands_end_with_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    outcome = play(tmp_path, End(STOPPED, TRAINING, signals=((50, number),)), monkeypatch)
    assert (outcome.exit_code, outcome.code_of_command) == (STOPPED, code)
    assert Outcome("failed", ExitCode.FAILED).code_of_command == FAILED


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("train", signal.SIGTERM, 4), ("train", signal.SIGINT, 4), ("run", signal.SIGHUP, 4), ("run", signal.SIGUSR1, 4),
     ("evaluate", signal.SIGINT, 130)],
)  # fmt: skip
def test_a_signal_before_there_is_a_job(command: str, number: signal.Signals, code: int) -> None:
    words = f"import os, sys; sys.argv = ['distlaunch', '{command}', 'x']; from distlaunch.cli import main as cli\n"
    words += f"cli.cli.main = lambda **_: os.kill(os.getpid(), {int(number)})\ncli.main()"
    assert subprocess.run([sys.executable, "-c", words], check=False, capture_output=True).returncode == code


_LOST = """
import os, signal, sys, time
sys.argv = ["distlaunch", "evaluate", "x"]
from distlaunch.cli import main as cli

class Ignores:
    def __del__(self):
        signal.raise_signal({number})

def work(**_):
    made = Ignores()
    del made
    until = time.monotonic() + 20
    while time.monotonic() < until:
        pass
    return 0

cli.cli.main = work
cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_where_python_ignores_exceptions(number: signal.Signals, code: int) -> None:
    words = [sys.executable, "-c", _LOST.format(number=int(number))]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOENT, 2), (errno.EACCES, 2), (errno.EROFS, 2), (errno.EISDIR, 2), (errno.ENOSPC, 75), (errno.EDQUOT, 75),
     (errno.ESTALE, 75), (errno.EIO, 75), (errno.ECHILD, 3)],
)  # fmt: skip
def test_errors_of_the_system(number: int, code: int) -> None:
    assert code_of_os_error(OSError(number, os.strerror(number), "a/b")) == code
    assert code_of_os_error(OSError(number, os.strerror(number))) == (FAILED if code == USAGE else code)


def test_hosts_that_are_down_may_come_back() -> None:
    def reason(stderr: str) -> str:
        return explain(stderr, 255, target="me@b", name="b", python="python3")

    down, refused = reason("ssh: connect to host b port 22: No route to host"), reason("Connection refused")
    wrong = reason("me@b: Permission denied (publickey).")
    with pytest.raises(HostsError):
        raise_for({"b": down, "c": refused, "d": "it has not answered within 30 s"})
    with pytest.raises(UsageError) as raised:
        raise_for({"b": down, "c": wrong})
    assert (raised.value.exit_code, HostsError.exit_code, RunBusyError.exit_code) == (USAGE, TEMPORARY, TEMPORARY)


# the third in a row


def emit(run: RunDir, attempt: int, *events: Event) -> None:
    writer = EventWriter(run.events, attempt=attempt, task="worker:0")
    for event in events:
        writer.write(event)
    writer.close()


START = TrainingStarted(
    strategy="s", loop="fit", replicas=1, tasks=1, global_batch=8, epochs=9, first_epoch=0, first_step=0,
    steps_per_epoch=4, parameters=0,
)  # fmt: skip


def ended(status: str, step: int = 0) -> RunEnded:
    return RunEnded(status=status, step=step, epochs_done=0, seconds=1.0)


def end_job(run: RunDir, status: str, step: int, code: ExitCode, *, trains: bool = True) -> int:
    """Make an attempt that ends so, and return the exit code of its launcher."""
    number = run.next_attempt()
    run.attempt_config(number).parent.mkdir(parents=True)
    emit(run, number, *([START] if trains else []), ended(status, step))
    plan = plan_of(run.path, "worker:0")
    return limit_temporary_failures(run, AttemptResult(plan, Outcome(status, code))).outcome.exit_code


@pytest.mark.parametrize("step", [0, 7])
def test_the_third_end_in_a_row_at_one_step_is_a_failure_of_the_job(tmp_path: Path, step: int) -> None:
    run, outside = RunDir(tmp_path), ExitCode.TEMPORARY
    assert [end_job(run, "failed", step, outside) for _ in range(3)] == [TEMPORARY, TEMPORARY, FAILED]
    assert end_job(run, "failed", step, outside) == TEMPORARY  # somebody has tried it again


@pytest.mark.parametrize("between", ["another step", "stopped", "done", "a failure"])
def test_a_row_is_broken(tmp_path: Path, between: str) -> None:
    run, outside = RunDir(tmp_path), ExitCode.TEMPORARY
    assert [end_job(run, "failed", 7, outside) for _ in range(2)] == [TEMPORARY] * 2
    match between:
        case "another step":
            end_job(run, "failed", 8, outside)
        case "a failure":
            end_job(run, "failed", 7, ExitCode.FAILED)
        case _:
            end_job(run, between, 7, ExitCode.DONE)
    assert end_job(run, "failed", 7, outside) == TEMPORARY


def test_starts_without_a_step_count_from_the_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (run.checkpoints / "step-00000012").mkdir(parents=True)
    codes = [end_job(run, "failed", 0, ExitCode.TEMPORARY, trains=False) for _ in range(2)]
    error = OSError(errno.ENOSPC, "No space left on device", "x")
    with pytest.raises(DistlaunchError, match="3 times in a row at step 12") as raised, limiting_temporary_errors(run):
        raise error
    assert [*codes, raised.value.exit_code] == [TEMPORARY, TEMPORARY, FAILED]
    with pytest.raises(OSError, match="No space left"), limiting_temporary_errors(run):
        raise error
    with pytest.raises(UsageError), limiting_temporary_errors(run):
        raise UsageError("a mistake")


# wait


def run_of(folder: Path, name: str, *ends: tuple[int, Event]) -> RunDir:
    run = RunDir(folder / name)
    run.path.mkdir()
    run.config.touch()
    for attempt, event in ends:
        run.attempt_config(attempt).parent.mkdir(parents=True, exist_ok=True)
        emit(run, attempt, event)
    return run


DONE_RUN, FAILED_RUN = ended("done", 4), ended("failed", 4)
FINAL: dict[str, tuple[int, list[tuple[int, Event]]]] = {
    "done": (DONE, [(0, START), (0, DONE_RUN)]),
    "stopped": (STOPPED, [(0, ended("stopped"))]),
    "interrupted": (STOPPED, [(0, ended("interrupted"))]),
    "failed": (FAILED, [(0, FAILED_RUN), (0, JobFailed(exit_code=3, step=4))]),
    "a mistake": (USAGE, [(0, FAILED_RUN), (0, JobFailed(exit_code=2, step=4))]),
    "outside": (TEMPORARY, [(0, FAILED_RUN), (0, JobFailed(exit_code=75, step=4))]),
    "outside, then done": (DONE, [(0, FAILED_RUN), (0, JobFailed(exit_code=75, step=4)), (1, DONE_RUN)]),
    "killed": (TEMPORARY, [(0, START)]),
    "stopped, then killed": (TEMPORARY, [(0, ended("stopped")), (1, START)]),
    "killed when it had more epochs": (TEMPORARY, [(0, DONE_RUN), (1, START)]),
    "an export failed": (FAILED, [(0, ExportFailed(step=4, reason="no")), (0, DONE_RUN)]),
    "exported later": (
        DONE, [(0, ExportFailed(step=4, reason="no")), (0, DONE_RUN), (0, Exported(format="keras", path="", step=4))]
    ),
    "nothing was started": (TEMPORARY, []),
}  # fmt: skip


@pytest.mark.parametrize("name", FINAL)
def test_the_code_of_a_run_that_has_ended(tmp_path: Path, name: str) -> None:
    code, ends = FINAL[name]
    assert final_code(run_of(tmp_path, "a", *ends)) == code


def test_the_code_of_a_submitted_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, "a", (0, ended("stopped")))
    run.batch_exit.write_text("2\n")
    os.utime(run.batch_exit, (1e10, 1e10))
    assert final_code(run) == USAGE
    os.utime(run.batch_exit, (1, 1))  # it was resumed here since
    assert final_code(run) == STOPPED


def test_the_worst_code_wins() -> None:
    order = [USAGE, FAILED, TEMPORARY, STOPPED, DONE]
    for number, code in enumerate(order):
        assert worst_code(reversed(order[number:])) == code


def test_wait_ends_when_nobody_works_on_the_runs(tmp_path: Path) -> None:
    done, busy = run_of(tmp_path, "done", (0, DONE_RUN)), run_of(tmp_path, "busy", (0, START))
    lock, turns = busy.lock(), list[float]()
    lock.__enter__()

    def pause(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            emit(busy, 0, ended("stopped"))
            lock.__exit__(None, None, None)

    waited = wait_for_runs([busy, done], lambda text: None, pause)
    assert next(waited) == (done, DONE)
    assert not turns
    assert next(waited) == (busy, STOPPED)
    assert len(turns) == 3
    assert list(waited) == []


def test_wait_outlasts_a_job_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, "a", (0, ended("stopped")))
    run.write_submission(Submission("slurm", "1", 0.0))
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 'squeue: error: Socket timed out' >&2; exit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    turns = list[float]()

    def pause(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 5:
            run.batch_exit.write_text("3\n")

    assert list(wait_for_runs([run], lambda text: None, pause)) == [(run, FAILED)]
    assert len(turns) == 5


def test_wait_without_the_queue_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is missing, for example, after the run was copied to another machine."""
    monkeypatch.setenv("PATH", str(tmp_path))
    run = run_of(tmp_path, "a", (0, START))
    run.write_submission(Submission("slurm", "1", 0.0))
    turns, notes = list[float](), list[str]()
    lock = run.lock()
    lock.__enter__()

    def pause(seconds: float) -> None:
        turns.append(seconds)
        assert len(turns) <= 3, "the launcher has ended"
        if len(turns) == 3:
            emit(run, 0, ended("stopped"))
            lock.__exit__(None, None, None)

    assert list(wait_for_runs([run], notes.append, pause)) == [(run, STOPPED)]
    assert len(turns) == 3
    assert notes == [
        "job 1: there is no `squeue` on this machine's PATH; use a login node of the Slurm cluster; "
        "a requeue is not noticed here"
    ]
    run.batch_exit.write_text("75\n")
    assert list(wait_for_runs([run], notes.append, lambda seconds: pytest.fail("the job has ended"))) == [
        (run, TEMPORARY)
    ]


def test_wait_needs_the_queue_of_a_job_that_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = run_of(tmp_path, "a")
    run.write_submission(Submission("slurm", "1", 0.0))
    result = CliRunner().invoke(cli, ["wait", str(run.path)])
    assert isinstance(result.exception, UsageError)
    assert "the state of its job 1 is unknown: there is no `squeue` on this machine's PATH" in str(result.exception)


def test_wait_names_a_run_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["wait", str(tmp_path / "none")])
    assert isinstance(result.exception, UsageError)


# one table


def test_the_documents_and_the_help_list_the_same_codes() -> None:
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    section = page.partition("## Exit codes")[2].partition("\n\n`distlaunch COMMAND")[0]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(str(int(code)), text) for code, text in MEANINGS.items()]
    assert CODES.keys() == COMMANDS.keys()
    for name, codes in CODES.items():
        shown = CliRunner().invoke(cli, [name, "--help"]).output.partition("Exit codes:\n")[2]
        assert re.findall(r"^  (\d+) ", shown, re.MULTILINE) == [str(int(code)) for code in codes]
