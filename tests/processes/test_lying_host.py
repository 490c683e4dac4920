"""A host that somebody else has taken over: its agent sends what no agent does."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from supervised import REPOSITORY

from distlaunch.base.run_dir import RunDir
from distlaunch.runs.listing import summarize

_SSH = """#!/bin/sh
exec {python} -P {agent} {lies} {forged}
"""
_RUN = ("run", "--hosts", "liar", "--workers", "1", "--runs-dir", "runs", "job.py")
_CONFIG = """
name: job
model: {function: "distlaunch.workloads.images:mlp"}
data: {function: "distlaunch.workloads.images:fashion_mnist", global_batch: 32}
train: {epochs: 1}
engine: {kind: ssh, hosts: [liar]}
"""
_EVIL = "model: {function: /tmp/evil.py:model}"


class Liar:
    """Starts scripts on a host whose agent lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ssh = folder / "bin" / "ssh"
        self._ssh.parent.mkdir()
        self.run = RunDir(folder / "runs" / "job")

    def __call__(
        self, lies: list[dict[str, Any]], forge: dict[str, Any] | None = None, words: tuple[str, ...] = _RUN
    ) -> tuple[int, str]:
        (self.folder / "job.py").write_text("print('hello')")
        told = [shlex.quote(json.dumps(words)) for words in (lies, forge or {})]
        agent = Path(__file__).parent / "lying_agent.py"
        self._ssh.write_text(_SSH.format(python=sys.executable, agent=agent, lies=told[0], forged=told[1]))
        self._ssh.chmod(0o755)
        environ = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": REPOSITORY}
        argv = [sys.executable, "-m", "distlaunch", *words]
        done = subprocess.run(argv, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def liar(tmp_path: Path) -> Liar:
    return Liar(tmp_path)


def write(path: str, payload: str = _EVIL, **fields: Any) -> dict[str, Any]:
    return {"kind": "write", "payload": payload, "fields": {"path": path, **fields}}


@pytest.mark.parametrize(
    "lies",
    [
        pytest.param([write("config.yaml")], id="append", marks=pytest.mark.slow),
        pytest.param(
            [
                write(".config.yaml.part.tmp", fresh=True),
                {"kind": "move", "fields": {"path": ".config.yaml.part.tmp", "to": "config.yaml"}},
            ],
            id="replace",
        ),
        pytest.param([write("../../evil.py")], id="outside", marks=pytest.mark.slow),
        pytest.param([{"kind": "remove", "fields": {"path": "plan.json"}}], id="remove", marks=pytest.mark.slow),
        pytest.param(
            [{"kind": "beat", "fields": {"liveness": [3], "suspended": 7, "pids": None}}],
            id="beat",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [{"kind": "exit", "fields": {"task": "worker:0", "code": "zero"}}], id="exit", marks=pytest.mark.slow
        ),
        pytest.param([{"raw": base64.b64encode(b"\xff" * 64).decode()}], id="garbage", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_lies_is_lost(liar: Liar, lies: list[dict[str, Any]]) -> None:
    code, said = liar(lies)
    assert code == 75, said
    assert "the host liar was lost: it sent something that is not a message of an agent" in said
    assert not liar.run.config.exists()
    assert json.loads(liar.run.plan.read_text())["tasks"]
    assert not list(liar.folder.rglob("evil.py"))
    for path in liar.run.path.rglob("*"):
        assert not path.is_file() or _EVIL not in path.read_text(errors="replace")


@pytest.mark.parametrize(
    "forge",
    [
        {"reserve": {"ports": ["22"]}},
        pytest.param({"open": {"shared": "yes"}}, marks=pytest.mark.slow),
        pytest.param({"state": {"state": 3}}, marks=pytest.mark.slow),
    ],
)
def test_a_host_that_answers_nonsense_is_lost(liar: Liar, forge: dict[str, Any]) -> None:
    code, said = liar([], forge)
    assert code in (2, 75), said
    assert "it sent something that is not a message of an agent: its answer to" in said


@pytest.mark.parametrize("words", [_RUN, ("train", "job.yaml")], ids=["run", "train"])
def test_a_host_that_cannot_have_the_run_leaves_no_run(liar: Liar, words: tuple[str, ...]) -> None:
    (liar.folder / "job.yaml").write_text(_CONFIG)
    reason = f"cannot create {liar.run.path}: Permission denied; choose another runs_dir"
    code, said = liar([], {"open": {"error": reason}}, words)
    assert code == 2, said
    assert f"liar: {reason}" in said
    assert not list((liar.folder / "runs").iterdir())


def test_a_copy_that_an_earlier_agent_has_left_is_told(liar: Liar) -> None:
    code, said = liar([], {"open": {"kept": "/runs/job.kept-1"}})
    assert code == 0, said
    told = " ".join(said.split())
    assert "warning: liar: the copy of this run that an earlier agent has left was moved to /runs/job.kept-1; " in told


def test_a_resume_that_starts_no_task_has_failed(liar: Liar) -> None:
    (liar.folder / "job.yaml").write_text(_CONFIG)
    made = RunDir.claim(liar.folder / "runs", "job")
    made.config.write_text(_CONFIG)
    code, said = liar([], {"open": {"error": "a full disk"}}, ("train", "runs/job", "--resume"))
    assert code == 2, said
    assert summarize(made).status == "failed"


def test_a_flood_of_lines_is_bounded_on_screen_and_disk(liar: Liar) -> None:
    number = 20_000
    code, said = liar([{"kind": "line", "fields": {"task": "worker:0", "text": "\x1b[2Jflood " * 20}, "times": number}])
    assert code == 0, said[-2000:]
    assert said.count("flood") / 20 < number / 5
    assert "lines of this host are not shown" in said
    assert "\x1b" not in said
    # what its task has printed is there
    assert liar.run.task(0, "worker:0").stdout_log.read_text() == "hello\n"
