"""Tests that scripts and agents start without slow imports, and that a script reports its start.

The time until a script begins counts because a host may start many scripts at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from distlaunch.base.event_files import parse_events
from distlaunch.base.events import TaskStarted

_NEW = "import sys; before = set(sys.modules); import {0}; print(*sorted(set(sys.modules) - before))"
_COSTLY = {
    *("dataclasses", "inspect", "tempfile", "shutil", "hashlib", "platform", "random", "logging", "asyncio"),
    *("numpy", "psutil", "pydantic", "rich", "yaml", "tensorflow", "keras", "jax", "importlib.metadata"),
}
_TELL = """
import os, sys
from types import SimpleNamespace
from distlaunch.tasks.script import report_start
if len(sys.argv) > 2:
    os.uname = lambda: SimpleNamespace(nodename=sys.argv[2])
report_start(sys.argv[1], 2, "worker:1")
"""


def _python(*words: str) -> str:
    return subprocess.run([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.parametrize("module", ["distlaunch.tasks.script", "distlaunch.agent.remote.service"])
def test_nothing_that_takes_long_is_imported(module: str) -> None:
    new = _python(_NEW.format(module)).split()
    assert not _COSTLY & set(new)


def test_its_start_is_an_event(tmp_path) -> None:
    _python(_TELL, str(tmp_path))
    line = (tmp_path / "events.jsonl").read_bytes()
    (event,) = parse_events(line)
    assert isinstance(event, TaskStarted)
    assert (event.attempt, event.task) == (2, "worker:1")
    assert event.pid > 1
    assert event.time > 0
    assert json.loads(event.to_json()) == json.loads(line)


@pytest.mark.parametrize("left", ["", '{"event":"TaskStarted","ti', '{"event":"TaskStarted"}\n'])
def test_its_start_is_a_line_of_its_own(tmp_path, left: str) -> None:
    (tmp_path / "events.jsonl").write_text(left)
    _python(_TELL, str(tmp_path))
    *before, last = (tmp_path / "events.jsonl").read_text().splitlines()
    assert before == left.splitlines()
    assert json.loads(last)["task"] == "worker:1"


@pytest.mark.parametrize("name", ['a"b\\c', "tab\tnew\nline", "häuschen-7.example", "\x7f", "🏠-1", "\U0010ffff"])
def test_any_name_of_a_host_is_valid(tmp_path, name: str) -> None:
    _python(_TELL, str(tmp_path), name)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["host"] == name
