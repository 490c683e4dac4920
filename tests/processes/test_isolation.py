"""`isolate`: jobs whose ports no other host reaches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.base.run_dir import RunDir

_SCRIPT = (Path(__file__).parent / "user_code" / "isolation.py").read_text()
_COMMAND = [sys.executable, "-m", "distlaunch", "run", "--isolate", "--workers", "2", "job.py"]
_WITHOUT_RIGHT = ["setpriv", "--bounding-set=-sys_admin"]


def _why_not(words: list[str]) -> str:
    """Why this system does not let this test run; empty if it does."""
    if os.getuid() and words:
        return "only root has a right to give up"
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return "needs unshare and setpriv (util-linux)"
    flags = ["--user", "--net"] if words or os.getuid() else ["--net"]
    done = subprocess.run([*words, "unshare", *flags, "true"], capture_output=True, text=True)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


@pytest.mark.parametrize("words", [[], _WITHOUT_RIGHT], ids=["as it is", "without the right"])
def test_tasks_reach_each_other_and_nothing_else(tmp_path: Path, words: list[str]) -> None:
    if why := _why_not(words):
        pytest.skip(why)
    (tmp_path / "job.py").write_text(_SCRIPT)
    done = subprocess.run([*words, *_COMMAND], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [files.stdout_log.read_text() for files in RunDir(tmp_path / "runs" / "job").tasks(0).values()]
    assert len(logs) == 2
    assert len({log.splitlines()[0] for log in logs}) == 1
    assert os.readlink("/proc/self/ns/net") not in logs[0]
    assert logs[0].splitlines()[1] == "out Network is unreachable"


def test_a_system_that_allows_none_is_told(tmp_path: Path) -> None:
    if why := _why_not(_WITHOUT_RIGHT):
        pytest.skip(why)
    (tmp_path / "job.py").write_text(_SCRIPT)
    # a namespace of users in which no more can be made
    refusing = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-sys_admin "$@"'
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", refusing, "sh", *_COMMAND]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "you cannot create a network namespace on this system (No space left on device)" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_config_asks_for_it_too(tmp_path: Path) -> None:
    """And what is wrong with the config is told before."""
    from tests.unit.config_files import BASE, write_models

    write_models(tmp_path)
    (tmp_path / "a.yaml").write_text(BASE + "cluster: {isolate: true}\nengine: {kind: ssh, hosts: [a]}\n")
    words = [sys.executable, "-m", "distlaunch", "train", "a.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "a.yaml:6: cluster.isolate: works for jobs on this machine only" in done.stderr
