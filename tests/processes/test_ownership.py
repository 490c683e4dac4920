"""Tests of which runs may be resumed on a machine with several users. Some use real users, by `setpriv`."""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from supervised import REPOSITORY

from distlaunch.base.errors import ConfigError, ExitCode, UsageError
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files import ownership
from distlaunch.base.run_files.ownership import TRUST_ENV, Ownership, check_ownership, ownership_of
from distlaunch.config.read.load import dump_config, load_config
from distlaunch.config.resume import find_run
from distlaunch.config.user_settings import settings_path, trusted_folders

ME, OTHER = 41001, 41002
two_users = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv of util-linux"
)

CONFIG = """\
model: {function: "m.py:model"}
data: {function: "m.py:data", global_batch: 4}
compile: {optimizer: sgd, loss: mse}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all users reach and write to."""
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_uid == os.geteuid() and each != Path("/tmp"):
            each.chmod(each.stat().st_mode | 0o011)
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o777)
    (made / "m.py").write_text("def model(): ...\ndef data(): ...\n")
    (made / "job.yaml").write_text(CONFIG)
    return made


def make_run(folder: Path, number: int, *, uid: int | None = None, mode: int = 0o700) -> RunDir:
    """A run that was stopped, of this user or another."""
    runs = folder / "runs"
    if not runs.exists():
        runs.mkdir()
        runs.chmod(0o777)
    run = RunDir.claim(runs, "job")
    assert run.path.name == ("job" if number == 1 else f"job-{number}")
    (run.path / "attempts").mkdir(mode=0o700)
    run.config.write_text(dump_config(load_config(folder / "job.yaml", (f"runs_dir={runs}",)).config))
    run.path.chmod(mode)
    if uid is not None:
        for path in (run.path, *run.path.rglob("*")):
            os.chown(path, uid, uid)
    return run


def command(uid: int, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as another user."""
    argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", sys.executable, "-m", "distlaunch", *words]
    if not _is_reachable_by(uid):
        pytest.skip("other users of this machine cannot start this Python")
    environ = {**os.environ, "PYTHONPATH": REPOSITORY, "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


@functools.cache
def _is_reachable_by(uid: int) -> bool:
    argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", sys.executable, "-c", "import distlaunch"]
    return subprocess.run(argv, env={**os.environ, "PYTHONPATH": REPOSITORY}, capture_output=True).returncode == 0


@two_users
def test_runs_of_others_are_passed_over(folder: Path) -> None:
    mine = make_run(folder, 1, uid=ME)
    others = make_run(folder, 2, uid=OTHER, mode=0o755)
    done = command(ME, folder, "plan", "job.yaml", "--resume", "--no-variables")
    assert done.returncode == 0, done.stderr
    assert f"skipping runs/job-2 of user {OTHER}; resuming runs/job" in done.stdout + done.stderr
    assert str(mine.path) in done.stdout
    # by its path it is refused, and that nothing of it was run is the worker's part
    done = command(ME, folder, "plan", str(others.path), "--resume", "--no-variables")
    assert done.returncode == ExitCode.USAGE
    assert f"runs/job-2 belongs to user {OTHER}" in done.stderr
    # reading stays possible
    assert "job-2" in command(ME, folder, "runs").stdout


@two_users
def test_a_run_of_others_alone_is_no_run(folder: Path) -> None:
    make_run(folder, 1, uid=OTHER, mode=0o777)
    done = command(ME, folder, "plan", "job.yaml", "--resume", "--no-variables")
    assert done.returncode == 0, done.stderr
    assert "there is no run of yours called job yet: starting it" in done.stdout + done.stderr
    assert "runs/job-2" in done.stdout


@two_users
def test_a_team_trusts_a_folder(folder: Path) -> None:
    others = make_run(folder, 1, uid=OTHER, mode=0o777)
    words = ("plan", "job.yaml", "--resume", "--no-variables")
    done = command(ME, folder, *words, **{TRUST_ENV: f"/nowhere:{folder / 'runs'}"})
    assert "resuming runs/job" in done.stdout + done.stderr
    # the same in a file of the user's own, which nobody else may have written
    path = folder / "mine" / "distlaunch" / "settings.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"trust: [{folder / 'runs'}]\n")
    settings = {"XDG_CONFIG_HOME": str(folder / "mine")}
    os.chown(path, OTHER, OTHER)
    assert "other users can write to it" in command(ME, folder, *words, **settings).stderr
    os.chown(path, ME, ME)
    done = command(ME, folder, *words, **settings)
    assert "resuming runs/job" in done.stdout + done.stderr, done.stderr
    assert str(others.path) in done.stdout
    # a config cannot
    (folder / "job.yaml").write_text(CONFIG + f"trust: [{folder / 'runs'}]\n")
    assert command(ME, folder, *words).returncode == ExitCode.USAGE


@two_users
def test_the_owner_is_the_one_that_a_file_gets_here_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that takes root for somebody else, its runs are root's own."""
    run = make_run(folder, 1, uid=OTHER)
    assert ownership_of(run.path).owner == f"user {OTHER}"
    real = ownership.owner_of_new_files
    monkeypatch.setattr(ownership, "owner_of_new_files", lambda path: (OTHER, real(path)[1]))
    assert ownership_of(run.path) == Ownership()


@two_users
def test_a_link_of_another_to_a_run_of_mine(folder: Path) -> None:
    run = make_run(folder, 1)
    link = folder / "runs" / "job-2"
    link.symlink_to(run.path)
    assert ownership_of(link) == Ownership()
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert ownership_of(link).owner == f"user {OTHER}"


@pytest.mark.parametrize(
    ("mode", "inner", "name"),
    [
        (0o777, 0o600, "it"),
        (0o755, 0o666, "config.yaml"),
        (0o711, 0o666, "config.yaml"),
        (0o770, 0o600, "it"),
        (0o755, 0o644, None),
        # below it nobody reaches anything
        (0o700, 0o666, None),
    ],
)
def test_what_others_can_write_to(folder: Path, mode: int, inner: int, name: str | None) -> None:
    run = make_run(folder, 1, mode=mode)
    os.chown(run.path, -1, 4242) if os.geteuid() == 0 else None
    run.config.chmod(inner)
    if name is None:
        assert check_ownership(run.path, "runs/job") == ""
        return
    with pytest.raises(UsageError, match=re.escape(f"others can write to {name} (mode")) as raised:
        check_ownership(run.path, "runs/job")
    assert "`chmod -R go-w runs/job`" in str(raised.value)
    # never a new start
    with pytest.raises(UsageError, match="others can write"):
        find_run(folder / "runs", "job", {})
    assert find_run(folder / "runs", "job", {TRUST_ENV: str(folder)}) is not None
    # what cannot be entered from outside cannot be written to
    folder.chmod(0o700)
    assert check_ownership(run.path, "runs/job") == ""


def test_checkpoints_may_be_a_link_of_ones_own(folder: Path) -> None:
    run, elsewhere = make_run(folder, 1), folder / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    run.checkpoints.symlink_to(elsewhere)
    assert ownership_of(run.path) == Ownership()
    elsewhere.chmod(0o777)
    assert "others can write to checkpoints (mode 0777)" in ownership_of(run.path).problem


def test_what_a_config_that_is_a_link_leads_to_counts(folder: Path) -> None:
    run, elsewhere = make_run(folder, 1), folder / "elsewhere.yaml"
    run.config.rename(elsewhere)
    run.config.symlink_to(elsewhere)
    elsewhere.chmod(0o644)
    assert ownership_of(run.path) == Ownership()
    elsewhere.chmod(0o666)
    assert "others can write to config.yaml (mode 0666)" in ownership_of(run.path).problem


def test_a_disk_without_permissions_cannot_be_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(folder, 1, mode=0o777)
    monkeypatch.setattr(ownership, "owner_of_new_files", lambda path: (os.geteuid(), False))
    notes = list[str]()
    found = find_run(folder / "runs", "job", {}, notes.append)
    assert found is not None
    assert len(notes) == 1
    assert "its disk keeps no permissions" in notes[0]
    assert str(run.path) in notes[0]


@pytest.mark.parametrize("text", ["trust: x", "trust: [3]", "other: 3", "[", "[]", "trust: ['']", "&a [*a]", "- 3"])
def test_settings_that_are_none(tmp_path: Path, text: str) -> None:
    path = settings_path({"XDG_CONFIG_HOME": str(tmp_path)})
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=r"settings\.yaml: "):
        trusted_folders({"XDG_CONFIG_HOME": str(tmp_path)})


def test_settings(tmp_path: Path) -> None:
    path = settings_path({"HOME": str(tmp_path)})
    assert path == tmp_path / ".config/distlaunch/settings.yaml"
    assert trusted_folders({"HOME": str(tmp_path)}) == ()
    path.parent.mkdir(parents=True)
    path.write_text(f"trust: [{tmp_path}/a, {tmp_path}/b]")
    path.chmod(0o600)
    assert trusted_folders({"HOME": str(tmp_path), TRUST_ENV: "/c"}) == (Path("/c"), tmp_path / "a", tmp_path / "b")
    path.chmod(0o666)
    with pytest.raises(UsageError, match="other users can write to it"):
        trusted_folders({"HOME": str(tmp_path)})


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_folders_of_a_run_are_its_owners_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        run = RunDir.claim(tmp_path / "runs", "job")
        with run.claim_attempt() as number:
            run.write_json(run.attempt_plan(number), {})
            run.write_json(run.task(number, "worker:0").error_json, {})
    finally:
        os.umask(before)
    folders = [run.path, *(path for path in run.path.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert len(folders) == 4


def test_a_task_refuses_a_config_that_was_swapped(tmp_path: Path) -> None:
    from distlaunch.base.errors import DistlaunchError
    from distlaunch.plan.train import config_mark_arguments
    from distlaunch.tasks.worker import read_config

    (tmp_path / "m.py").write_text("def model(): ...\ndef data(): ...\n")
    (tmp_path / "job.yaml").write_text(CONFIG)
    text = dump_config(load_config(tmp_path / "job.yaml").config)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    _, sha256 = config_mark_arguments(text)
    assert read_config(path, sha256).data.global_batch == 4
    path.write_text(text.replace("m.py:model", "theirs.py:model"))
    with pytest.raises(DistlaunchError, match="was modified after it was written for this attempt"):
        read_config(path, sha256)
    path.write_text(text + "\n")
    with pytest.raises(DistlaunchError) as raised:
        read_config(path, sha256)
    assert not isinstance(raised.value, ConfigError)
