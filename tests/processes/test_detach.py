"""Runs without a terminal, and the commands that work on them, with a worker that only pretends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from supervised import processes_of, wait_until
from test_commands import CONFIG, Shell

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.jobs.stop import stop_run
from distlaunch.runs.listing import find_runs

TWO = ["--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2"]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "job.yaml").write_text(CONFIG)
    (tmp_path / "m.py").write_text("def model():\n    pass\n\n\ndef data():\n    pass\n")
    yield Shell(tmp_path)
    for process in processes_of(tmp_path):  # launchers first or not: none of them has anything to save
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def run_of(shell: Shell, name: str = "job") -> RunDir:
    return RunDir(shell.directory / "runs" / name)


def detach(shell: Shell, *words: str, **env: str) -> int:
    """A run that waits for ever in its first epoch; returns its launcher's process."""
    code, out, err = shell("train", "job.yaml", "--detach", "--json", *words, **{"FAKE": "wait", **env})
    assert (code, err) == (0, "")
    told = json.loads(out)
    wait_until(lambda: list(Path(told["run"]).glob("waiting-*")))
    return told["pid"]


def follow(shell: Shell, *words: str) -> tuple[subprocess.Popen[bytes], Callable[[], str]]:
    """`logs -f` in the background, and what it has printed so far."""
    path = shell.directory / "followed.txt"
    argv = [sys.executable, "-m", "distlaunch", "logs", "-f", *words]
    with path.open("wb") as file:
        process = subprocess.Popen(argv, cwd=shell.directory, env=shell.env, stdout=file, stderr=file)
    return process, path.read_text


def test_a_detached_run(shell: Shell) -> None:
    code, out, err = shell("train", "job.yaml", "--detach")
    assert (code, out) == (0, "runs/job\n")
    assert err == "follow it  distlaunch logs runs/job -f\nstop it    distlaunch stop runs/job\n"
    wait_until(lambda: not processes_of(shell.directory))  # the launcher tells the end after it has let the lock go
    assert run_of(shell).finished()
    log = run_of(shell).launcher_log.read_text()
    assert "hello from the model" in log
    assert re.search(r"^status +done$", log, re.MULTILINE)
    assert "\x1b" not in log


def test_it_survives_its_terminal(shell: Shell) -> None:
    """A shell in a terminal starts it; the terminal is closed, and what is left of its session is told by SIGHUP."""
    child, terminal = pty.fork()
    if not child:
        os.chdir(shell.directory)
        words = f"{sys.executable} {Path(__file__).with_name('fake_cli.py')} train job.yaml --detach; read line"
        os.execve("/bin/sh", ["sh", "-c", words], {**shell.env, "FAKE": "wait"})
    wait_until(lambda: (shell.directory / "runs/job/waiting-worker:0").exists())
    owner = run_of(shell).owner()
    assert owner is not None
    wait_until(lambda: b"stop it" in os.read(terminal, 4096))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGHUP
    assert os.getsid(owner.pid) == owner.pid
    os.kill(owner.pid, signal.SIGHUP)
    shell("stop", "runs/job")
    assert "(SIGTERM)" in run_of(shell).launcher_log.read_text()


def test_a_terminal_that_is_closed_while_the_launcher_comes_up(shell: Shell) -> None:
    """Nobody reads the pipe any more at whose end the command has waited."""
    code = "import os, pathlib; from distlaunch.jobs.detach import Daemon; reading, writing = os.pipe()\n"
    code += "os.close(reading); Daemon(writing, pathlib.Path('log')).settle(); print('going on')"
    subprocess.run([sys.executable, "-c", code], cwd=shell.directory, env=shell.env, check=True)
    assert (shell.directory / "log").read_text() == "going on\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_launcher_comes_up(shell: Shell, number: signal.Signals) -> None:
    file = shell.directory / "launcher"
    process = shell.start("train", "job.yaml", "--detach", FAKE_ALLOCATING=str(file))
    wait_until(lambda: file.exists() and file.read_text())
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (4, "")
    assert err == f"runs/job: stopped ({number.name}) before any task was started; run the same command again\n"
    assert not psutil.pid_exists(int(file.read_text()))
    assert not list(shell.directory.glob("runs/*"))


def test_a_log_that_cannot_be_written(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", FAKE="fail")[0] == 3
    run_of(shell).launcher_log.mkdir()
    code, out, err = shell("train", "runs/job", "--resume", "--detach")
    why = "the launcher's log cannot be written: Is a directory; move it away, or allow yourself to write it"
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"error: runs/job/launcher.log: {why}"
    assert run_of(shell).attempts() == [0]


def test_a_log_that_cannot_be_created(shell: Shell) -> None:
    """The command returns all the same, and the job goes on."""
    code, out, err = shell("train", "job.yaml", "--detach", FAKE="wait", FAKE_LOG="/proc/none/launcher.log")
    assert (code, out) == (0, "runs/job\n")
    lost = "cannot be written: No such file or directory; the output is lost"
    assert err.startswith(f"warning: /proc/none/launcher.log: {lost}\n")
    wait_until(lambda: (run_of(shell).path / "waiting-worker:0").exists())


def test_mistakes_are_told_at_once(shell: Shell) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for words, message in [
            (["--set", "train.epochs=many"], "train.epochs"),
            ([*TWO, "--set", f"cluster.ports=[{port}, 1]"], f"port {port} is in use"),
            (["--smoke"], "--detach: --smoke"),
        ]:
            code, out, err = shell("train", "job.yaml", "--detach", *words)
            assert (code, out) == (2, "")
            assert message in err
            assert "Traceback" not in err
    assert not list(shell.directory.glob("runs/*"))


def test_a_run_in_use_or_finished(shell: Shell) -> None:
    pid = detach(shell)
    code, out, err = shell("train", "job.yaml", "--detach", "--resume")
    assert (code, out) == (75, "")
    assert f"this run is still running (process {pid})" in err
    assert shell("stop", "runs/job")[0] == 0
    assert shell("train", "job.yaml", "--detach", "--resume", "-q") == (0, "", "")
    wait_until(lambda: not run_of(shell).is_busy())
    assert run_of(shell).attempts() == [0, 1]
    finished = "runs/job has finished, and nothing is left to do; to train longer, increase `train.epochs`\n"
    assert shell("train", "runs/job", "--detach", "--resume") == (0, "runs/job\n", finished)
    again = json.loads(shell("train", "runs/job", "--detach", "--resume", "--json")[1])
    assert again == {"run": str(run_of(shell).path), "pid": None}
    events = [json.loads(line) for line in shell("train", "runs/job", "--resume", "--json")[1].splitlines()]
    assert [event["event"] for event in events] == ["CommandStarted", "CommandEnded"]
    assert (events[0]["run"], events[0]["name"]) == (str(run_of(shell).path), "job")


def test_stop(shell: Shell) -> None:
    detach(shell)
    code, out, err = shell("stop", "runs/job")
    assert (code, err) == (0, "")
    assert out == "runs/job: stopped at step 4\nnext  distlaunch train runs/job --resume\n"
    wait_until(lambda: not processes_of(shell.directory))
    assert shell("stop", "runs/job")[:2] == (0, "runs/job is not running: stopped at step 4\n")
    assert shell("stop", "runs/none")[0] == 2


def test_a_run_that_was_stopped_before_it_had_anything_to_save(shell: Shell) -> None:
    detach(shell, FAKE="wait_early")
    _, out, err = shell("stop", "runs/job")
    again = "distlaunch train runs/job --resume"
    why = "(from the beginning: there is no checkpoint)"
    assert (out, err) == (f"runs/job: stopped before the first step\nnext  {again}  {why}\n", "")
    told = run_of(shell).launcher_log.read_text().split()
    assert " ".join(told[told.index("next") :]) == f"next {again} {why}"


def freeze_tasks(launcher: int) -> None:
    for process in psutil.Process(launcher).children():
        if any("fake_worker" in word for word in process.cmdline()):
            process.suspend()


def test_stop_now(shell: Shell) -> None:
    freeze_tasks(detach(shell))
    code, out, _ = shell("stop", "runs/job", "--now")
    assert (code, out.splitlines()[0]) == (0, "runs/job: interrupted at step 4")
    wait_until(lambda: not processes_of(shell.directory))


def test_stop_after_ctrl_c(shell: Shell) -> None:
    pid = detach(shell)
    os.kill(pid, signal.SIGINT)
    assert "runs/job" in shell("stop", "runs/job")[1]
    assert "interrupted at step 4" in shell("stop", "runs/job")[1]


def test_stop_does_not_wait_for_ever(shell: Shell) -> None:
    pid = detach(shell)
    freeze_tasks(pid)
    code, out, err = shell("stop", "runs/job", "--timeout", "0.2")
    assert (code, out) == (75, "")
    assert err == f"error: runs/job: its launcher (process {pid}) is still running after 0.2 s\n"


def test_a_run_that_was_started_with_ctrl_c_ignored_ends_at_once(shell: Shell) -> None:
    """`stop --now` is immediate even if a run ignores Ctrl-C, as it does if a script starts it with `&`."""
    words = f"trap '' INT; exec {sys.executable} {Path(__file__).with_name('fake_cli.py')} train job.yaml -q"
    process = subprocess.Popen(["sh", "-c", words], cwd=shell.directory, env={**shell.env, "FAKE": "wait"})
    wait_until(lambda: list(shell.directory.glob("runs/job/waiting-*")))
    assert shell("stop", "runs/job", "--now")[0] == 0
    assert process.wait(timeout=10) == 4


def test_stacks_of_a_run_that_goes_on(shell: Shell) -> None:
    detach(shell)
    code, out, _ = shell("logs", "runs/job", "--stacks", "--raw")
    assert code == 0
    assert "most recent call first" in out
    assert run_of(shell).is_busy()
    shell("stop", "runs/job")
    assert (
        "--stacks: runs/job is not running, so there are no stacks to show" in shell("logs", "runs/job", "--stacks")[2]
    )


def test_only_the_holder_of_the_lock_is_stopped(shell: Shell) -> None:
    """The lock file of a launcher that is gone names a number that may be another process by now."""
    shell("train", "job.yaml", "-q")
    lock = run_of(shell).path / ".lock"
    lock.write_text(f"{os.getpid()} {socket.gethostname()}")
    assert "is not running: done" in shell("stop", "runs/job")[1]
    with run_of(shell).lock():
        lock.write_text("1 other-host")
        assert "its launcher is process 1 on other-host; stop it on that host" in shell("stop", "runs/job")[2]
    with run_of(shell).lock(notebook=True):
        code, _, err = shell("stop", "runs/job")
        assert (code, "runs in a notebook" in err) == (2, True)
    assert not stop_run(run_of(shell))


def test_logs(shell: Shell) -> None:
    shell("train", "job.yaml", "-q", *TWO)
    code, out, err = shell("logs", "runs/job")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == ["[worker:0] hello from the model", "[worker:1] hello from the model"]
    assert "training  multi_worker_mirrored, 2 replicas" in out
    assert "noise" not in out
    assert shell("logs", "runs/job", "--task", "worker:1")[1] == "hello from the model\n"
    raw = shell("logs", "runs/job", "--task", "worker:1", "--raw", "--lines", "1")[1]
    assert raw == "hello from the model\nI0000 00:00:1.5  12 x.cc:1] noise\n"
    assert "attempt 0 of runs/job has worker:0, worker:1" in shell("logs", "runs/job", "--task", "ps:0")[2]
    assert "--attempt: got 3; runs/job has 0" in shell("logs", "runs/job", "--attempt", "3")[2]


@pytest.mark.parametrize("follow", [pytest.param((), marks=pytest.mark.slow), ("-f",)], ids=["now", "followed"])
def test_the_last_lines_of_logs_and_events(follow: tuple[str, ...], shell: Shell) -> None:
    shell("train", "job.yaml", "-q", "--set", "train.epochs=3")
    whole = shell("logs", "runs/job")[1].splitlines()
    logged = ["hello from the model"]
    epochs = [line for line in whole if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    end = ["done"] if follow else []
    for number, expected in [(0, []), (1, logged + whole[-1:]), (2, logged + whole[-2:]), (99, whole)]:
        assert shell("logs", "runs/job", "-n", str(number), *follow)[1].splitlines() == expected + end
    assert epochs[-1] in whole[-2:]


def test_logs_of_many_lines(shell: Shell) -> None:
    shell("train", "job.yaml", "-q")
    log = run_of(shell).task(0, "worker:0").stdout_log
    log.write_text("".join(f"line {number}\n" for number in range(100_000)) + "no end")
    assert shell("logs", "runs/job", "--task", "worker:0", "-n", "2")[1] == "line 99998\nline 99999\nno end\n"
    argv = f"{sys.executable} -m distlaunch logs runs/job | head -1; echo ${{PIPESTATUS[0]}}"
    piped = subprocess.run(["bash", "-c", argv], cwd=shell.directory, env=shell.env, capture_output=True, text=True)
    assert (piped.stdout, piped.stderr) == ("line 0\n0\n", "")


def test_logs_follow_to_the_end(shell: Shell) -> None:
    detach(shell)
    process, printed = follow(shell, "runs/job")
    wait_until(lambda: "training" in printed())
    shell("stop", "runs/job")
    assert process.wait(timeout=10) == 0
    assert printed().splitlines()[0] == "hello from the model"
    assert printed().splitlines()[-1] == "stopped"


def test_logs_follow_over_restarts(shell: Shell) -> None:
    shell("train", "job.yaml", "--detach", "-q", "--set", "restarts.max=1", FAKE="kill=worker:0")
    process, printed = follow(shell, "runs/job", "--attempt", "0")
    assert process.wait(timeout=15) == 0
    assert re.search(r"worker:0 on here: killed by SIGKILL.*\nfailed\n\Z", printed())
    process, printed = follow(shell, "runs/job")
    assert process.wait(timeout=15) == 0
    assert printed().endswith("done\n")
    assert "restored" in printed()


def test_waiting_for_several_runs(shell: Shell) -> None:
    assert shell("train", "job.yaml", "-q", "--name", "done")[0] == 0
    assert shell("train", "job.yaml", "-q", "--name", "failed", FAKE="fail")[0] == 3
    launcher = psutil.Process(detach(shell))
    words = (sys.executable, "-m", "distlaunch", "wait", "--json", "runs/job")
    for number, code in ((signal.SIGTERM, -signal.SIGTERM), (None, 4)):
        with subprocess.Popen(
            [*words, *(() if number else ("runs/done",))], cwd=shell.directory, env=shell.env, stdout=subprocess.PIPE
        ) as waiting:
            if number is None:
                assert waiting.stdout is not None
                assert json.loads(waiting.stdout.readline())["exit_code"] == 0  # the other is still waited for
                assert shell("stop", "runs/job")[0] == 0
                told = json.loads(waiting.stdout.readline())
                assert (Path(told["run"]).name, told["status"], told["exit_code"]) == ("job", "stopped", 4)
            else:
                waiting.send_signal(number)
        assert waiting.returncode == code
        assert number is None or launcher.is_running()
    code, out, err = shell("wait", "runs/job", "runs/failed", "runs/done")
    assert (code, err) == (3, "")
    assert sorted(out.splitlines()) == [
        "runs/done: done, exit code 0", "runs/failed: failed, exit code 3", "runs/job: stopped, exit code 4",
    ]  # fmt: skip
    code, out, err = shell("wait", "runs/done", "runs/no")
    assert (code, out) == (2, "")
    assert "runs/no: there is no such run" in err


def test_following_ends_with_ctrl_c_and_with_its_reader(shell: Shell) -> None:
    detach(shell)
    process, printed = follow(shell, "runs/job")
    wait_until(lambda: "training" in printed())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert "Traceback" not in printed()
    argv = [sys.executable, "-m", "distlaunch", "logs", "-f", "runs/job"]
    process = subprocess.Popen(argv, cwd=shell.directory, env=shell.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"hello from the model\n"
    process.stdout.close()
    assert process.wait(timeout=10) == 0
    assert run_of(shell).is_busy()


def test_runs(shell: Shell) -> None:
    shell("train", "job.yaml", "-q", "--name", "good")
    shell("train", "job.yaml", "-q", "--name", "bad", FAKE="fail")
    pid = detach(shell, "--name", "lost")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not run_of(shell, "lost").is_busy())
    detach(shell, "--name", "now", *TWO)
    (shell.directory / "runs/no-run").mkdir()
    code, out, err = shell("runs", COLUMNS="40")
    assert (code, err) == (0, "")
    cells = [re.split(r" {3,}", line) for line in out.splitlines()]
    assert cells[0] == [
        *("run", "status", "strategy", "epoch", "step", "last values", "best val_loss"),
        *("workers", "started", "time", "attempts"),
    ]
    assert [line[:2] for line in cells[1:]] == [
        ["runs/good", "done"],
        ["runs/bad", "failed"],
        ["runs/lost", "killed"],
        ["runs/now", "running"],
    ]
    assert cells[1][2:6] == ["one_device", "2/2", "8", "loss 0.5000, val 1.0000  accuracy 0.5000"]
    told = json.loads(shell("runs", "--json")[1])
    assert [(run["status"], run["step"], run["culprit"]) for run in told][1] == ("failed", 8, "worker:0")
    for path, message in [("nope", "there is no such directory"), ("runs/good", "is a run itself")]:
        with pytest.raises(UsageError, match=message):
            find_runs(shell.directory / path, 0.0)


def test_of_long_histories_only_the_ends_are_read(shell: Shell) -> None:
    """A run's own last step counts, and it is at the end: a line in the middle that says more is not seen."""
    shell("train", "job.yaml", "-q")
    run = run_of(shell)
    lines = run.events.read_text().splitlines()
    steps = next(line for line in lines if "StepsDone" in line)
    at = lines.index(steps)
    middle = [steps] * 5_000 + [steps.replace('"step":', '"step":99')] + [steps] * 5_000
    run.events.write_text("\n".join([*lines[:at], *middle, *lines[at:]]) + "\n")
    shutil.copytree(run.path, run.path.with_name("job-2"))
    found, _ = find_runs(run.path.parent, 0.0)
    assert len(found) == 2
    assert {(each.status, each.step, each.epoch) for each in found} == {("done", 8, 2)}
