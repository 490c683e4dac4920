"""Tests that commands leave behind no temporary folders and no processes that a script or training has started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
from supervised import wait_until
from tiny_job import MODULE, command, environment, kill_all, run_command, write_job

from distlaunch.agent.leftover_processes import end_leftovers
from distlaunch.base.protocol import ATTEMPT, RUN_DIR, TASK
from distlaunch.base.run_dir import RunDir

_STARTS = """#!/bin/bash
{prefix} setsid bash -c 'echo $$ > {pid}; exec sleep 600' < /dev/null > /dev/null 2>&1 &
until [ -s {pid} ]; do sleep 0.01; done
exit {code}
"""
_WAITS = MODULE.replace("def data():", "def data():\n    open('begun', 'w').close(); import time; time.sleep(600)")


@pytest.mark.parametrize(
    ("prefix", "code", "lives"), [("", 0, False), ("", 7, False), ("env -u DISTLAUNCH_RUN_DIR", 0, True)]
)
def test_a_child_in_a_session_of_its_own(tmp_path: Path, prefix: str, code: int, lives: bool) -> None:
    script = tmp_path / "job.sh"
    script.write_text(_STARTS.format(prefix=prefix, pid=tmp_path / "pid", code=code))
    script.chmod(0o755)
    done = run_command("run", "./job.sh", cwd=tmp_path)
    pid = int((tmp_path / "pid").read_text())
    try:
        assert done.code == (3 if code else 0), done.text
        assert psutil.pid_exists(pid) == lives
        assert (f"ended processes that tasks had left running: sleep ({pid})" in done.text) != lives
    finally:
        kill_all(pid)


_DAEMON = MODULE.replace(
    "def data():",
    """def data():
    import os, subprocess
    env = dict(os.environ)
    for name in ("one", "two"):
        if name == "two":
            del env["DISTLAUNCH_RUN_DIR"]
        sleep = subprocess.Popen(["sleep", "600"], env=env, start_new_session=True, stdout=-3, stderr=-3)
        open(name, "w").write(str(sleep.pid))""",
)


def test_a_daemon_that_training_has_started(tmp_path: Path) -> None:
    write_job(tmp_path, _DAEMON)
    done = run_command("train", "job.yaml", cwd=tmp_path)
    ended, lives = (int((tmp_path / name).read_text()) for name in ("one", "two"))
    try:
        assert done.code == 0, done.text
        assert f"ended processes that tasks had left running: sleep ({ended})" in done.text
        assert not psutil.pid_exists(ended)
        assert psutil.pid_exists(lives)
    finally:
        kill_all(ended)
        kill_all(lives)


def test_ancestors_that_cannot_be_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The /proc of some machines, mounted with hidepid=1, denies access to the processes of other users."""

    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    environ = {**os.environ, RUN_DIR: str(tmp_path), ATTEMPT: "0", TASK: "worker:0"}
    sleep = subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True)
    try:
        monkeypatch.setattr(psutil.Process, "parent", refuse)
        ended = end_leftovers(str(tmp_path), 0, ["worker:0"])
        assert ended == f"ended processes that tasks had left running: sleep ({sleep.pid})"
    finally:
        kill_all(sleep.pid)


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        # any program may have an option -d, in a folder of any name
        (("distlaunch/bin/serve", "-d", "out"), False),
        (("bin/distlaunch", "train", "job.yaml", "-qd"), True),
        (("bin/distlaunch", "train", "job.yaml", "--detach"), True),
        (("bin/distlaunch", "train", "job.yaml", "--name", "d"), False),
    ],
)
def test_only_detached_launchers_stay(tmp_path: Path, words: tuple[str, ...], stays: bool) -> None:
    program = tmp_path / words[0]
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nsleep 600\nexit 0\n")
    program.chmod(0o755)
    environ = environment(**{RUN_DIR: str(tmp_path), ATTEMPT: "0", TASK: "worker:0"})
    process = subprocess.Popen([program, *words[1:]], env=environ, start_new_session=True)
    try:
        wait_until(lambda: bool(psutil.Process(process.pid).children()), timeout_s=30)
        assert (end_leftovers(str(tmp_path), 0, ["worker:0"]) == "") == stays
    finally:
        kill_all(process.pid)
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_plan_that_is_ended_leaves_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    write_job(tmp_path, _WAITS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = [*command(), "plan", "job.yaml", "--data"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(TMPDIR=str(temporary)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        wait_until(lambda: (tmp_path / "begun").exists(), timeout_s=60)
        assert os.listdir(temporary)
        process.send_signal(number)
        error = process.communicate(timeout=30)[1]
        assert process.returncode == 128 + number
        assert b"Traceback" not in error
        assert os.listdir(temporary) == []
    finally:
        kill_all(process.pid)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an export, and rows for it."""
    folder = tmp_path_factory.mktemp("exported")
    write_job(folder, export=["keras", "saved_model"])
    done = run_command("train", "job.yaml", "-q", cwd=folder)
    assert done.code == 0, done.text
    np.save(folder / "rows.npy", np.zeros((8, 4), "float32"))
    return folder


_PREDICT = ("predict", "runs/job/export/model.keras", "--input", "rows.npy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        _PREDICT,
        ("predict", "runs/job/export/saved_model", "--input", "rows.npy"),
        ("verify", "job.yaml", "--steps", "3", "--strategies", "mirrored"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_ended_leaves_no_folder(
    exported: Path, tmp_path: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    env = environment(TMPDIR=str(tmp_path))
    process = subprocess.Popen([*command(), *words], cwd=exported, env=env, stdout=-3, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: os.listdir(tmp_path), timeout_s=60)
        process.send_signal(number)
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 128 + number
        assert b"Traceback" not in error
        assert os.listdir(tmp_path) == []
    finally:
        kill_all(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("evaluate", "--split", "train"), ("predict", "--split", "train"), ("export",)])
def test_a_reader_that_is_ended_leaves_no_folder(exported: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    run, env = RunDir(exported / "runs" / "job"), environment(TMPDIR=str(tmp_path))
    attempt, exports = run.next_attempt(), sorted(os.listdir(run.export))
    process = subprocess.Popen([*command(), *words, "runs/job"], cwd=exported, env=env, stdout=-3, stderr=-1)
    try:
        wait_until(lambda: run.reader_events(attempt).exists(), timeout_s=60)
        process.terminate()
        error = process.communicate(timeout=60)[1]
        assert process.returncode in (0, 143), error  # it may be done before it looks
        assert b"Traceback" not in error
        assert os.listdir(tmp_path) == []
        assert sorted(os.listdir(run.export)) == exports
    finally:
        kill_all(process.pid)
