"""What a script waits for before it begins: a host may start many at a time."""

from __future__ import annotations

import json
import subprocess
import sys

from distlaunch.base.event_files import parse_events
from distlaunch.base.events import TaskStarted

_NEW = (
    "import sys; before = set(sys.modules); import distlaunch.tasks.script; print(*sorted(set(sys.modules) - before))"
)
_TELL = """
import sys
from pathlib import Path
from distlaunch.base.run_files.task_dir import TaskDir
from distlaunch.tasks.script import _report_start
_report_start(TaskDir(Path(sys.argv[1])), 2, "worker:1")
"""


def _python(*words: str) -> str:
    return subprocess.run([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True, check=True).stdout


def test_it_imports_little() -> None:
    new = _python(_NEW).split()
    own = [name for name in new if name.startswith("distlaunch.")]
    assert set(own) <= {
        *("distlaunch.base", "distlaunch.base.heartbeat", "distlaunch.base.line_files", "distlaunch.base.protocol"),
        *("distlaunch.base.run_files", "distlaunch.base.run_files.task_dir", "distlaunch.base.secret_values"),
        *("distlaunch.tasks", "distlaunch.tasks.lifeline", "distlaunch.tasks.script"),
    }
    assert not {"argparse", "dataclasses", "inspect", "socket", "pydantic", "click", "rich"} & set(new)


def test_its_start_is_an_event(tmp_path) -> None:
    _python(_TELL, str(tmp_path))
    line = (tmp_path / "events.jsonl").read_bytes()
    (event,) = parse_events(line)
    assert isinstance(event, TaskStarted)
    assert (event.attempt, event.task) == (2, "worker:1")
    assert event.pid > 1
    assert event.time > 0
    assert json.loads(event.to_json()) == json.loads(line)
