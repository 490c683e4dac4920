"""Control characters of names and messages are shown, and not obeyed by the terminal."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table
from rich.text import Text

from distlaunch.base.event_files import EventWriter
from distlaunch.base.events import RunEnded
from distlaunch.base.run_dir import RunDir
from distlaunch.base.visible import visible
from distlaunch.cli.main import cli
from distlaunch.config.read.load import dump_config, load_config
from distlaunch.ui.console import JobConsole
from tests.unit.config_files import BASE, write_models

HOSTILE = "a\x1b]0;title\x07b\x9b31mc\u202ed\x08\x7f\u2066"


def test_what_is_shown() -> None:
    assert visible(HOSTILE) == r"a\x1b]0;title\x07b\x9b31mc\u202ed\x08\x7f\u2066"
    assert visible("a\ud800b") == r"a\ud800b"
    assert visible("größe ✓ 漢字\tone\ntwo") == "größe ✓ 漢字\tone\ntwo"


@pytest.mark.parametrize("colours", [False, True])
def test_nothing_hostile_is_printed(colours: bool) -> None:
    out = io.StringIO()
    console = JobConsole(file=out, force_terminal=colours, color_system="standard" if colours else None)
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    for shown in (HOSTILE, Text(HOSTILE, style="bold"), table, Text.from_ansi("\x1b[31mred\x1b[0m plain")):
        console.print(shown, markup=False, highlight=False)
    found = out.getvalue()
    assert not {"\x07", "\x9b", "\u202e", "\x08", "\x7f", "\u2066"} & set(found)
    assert "\x1b]" not in found
    assert ("\x1b[31m" in found) == colours
    assert r"\x1b]0;title" in found


@pytest.mark.parametrize("command", ["validate", "stop", "wait", "report", "logs", "runs", "plan", "submit"])
def test_no_command_prints_a_hostile_name(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that others have named, as in `wait runs/*`."""
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path)
    Path("job.yaml").write_text(BASE)
    run = RunDir(tmp_path / "runs" / HOSTILE)
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(load_config(Path("job.yaml"), (), os.environ).config))
    run.attempt_config(0).parent.mkdir(parents=True)
    run.attempt_config(0).write_text(run.config.read_text())
    files = run.task(0, "worker:0")
    files.path.mkdir(parents=True)
    files.stdout_log.write_text(f"{HOSTILE}\n")
    writer = EventWriter(run.events, attempt=0, task="worker:0")
    writer.write(RunEnded(status="done", step=4, epochs_done=1, seconds=1.0))
    writer.close()
    given = {
        "validate": [f"runs/{HOSTILE}/config.yaml"],
        "runs": ["runs"],
        "plan": [f"runs/{HOSTILE}", "--resume", "--no-variables"],
        "submit": [f"runs/{HOSTILE}", "--resume", "--engine", "slurm"],
    }
    done = CliRunner().invoke(cli, [command, *given.get(command, [f"runs/{HOSTILE}"])])
    assert done.exit_code == 0, done.output
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\x08", "\x7f", "\u2066"} & set(done.output)
    if command in ("validate", "stop", "wait", "submit"):
        assert visible(HOSTILE) in done.output
