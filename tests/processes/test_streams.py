"""Standard streams that are closed or full, and folders with odd names."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from supervised import processes_of, wait_until
from tiny_job import LOSSES, command, losses, run_command, write_job

from distlaunch.base.event_files import read_events_of
from distlaunch.base.events import RunEnded
from distlaunch.base.run_dir import RunDir

_SLOW = pytest.mark.slow


def in_shell(folder: Path, words: str, streams: str, **env: str) -> tuple[int, str]:
    """Exit code and output of a command whose streams a shell has redirected."""
    line = f"{shlex.join(command())} {words} {streams}"
    done = run_command(cwd=folder, start=["sh", "-c", line], env=env)
    return done.code, done.text


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        pytest.param("", ">&-", marks=_SLOW),  # in CI test_environments.py
        pytest.param("--json", ">&- 2>&- <&-", marks=_SLOW),
        pytest.param("--quiet", ">&-", marks=_SLOW),
        pytest.param("--quiet", ">&- 2>&-", marks=_SLOW),
        pytest.param("--json", ">&-", marks=_SLOW),
        pytest.param("", "2>&-", marks=_SLOW),
        pytest.param("", "<&-", marks=_SLOW),
        pytest.param("", ">/dev/full 2>/dev/full", marks=_SLOW),
        pytest.param("--json", ">/dev/full", marks=_SLOW),
    ],
)
def test_a_run_ends_as_it_would(tmp_path: Path, options: str, streams: str) -> None:
    write_job(tmp_path)
    code, text = in_shell(tmp_path, f"train job.yaml {options}", streams)
    assert code == 0, text
    assert "Traceback" not in text
    assert losses(tmp_path) == LOSSES


@_SLOW  # in CI tests/processes/test_detach.py, with streams that are open
@pytest.mark.parametrize("streams", [">&-", ">&- 2>&- <&-"])
def test_a_detached_job(tmp_path: Path, streams: str) -> None:
    write_job(tmp_path)
    run = RunDir(tmp_path / "runs" / "job")
    try:
        code, text = in_shell(tmp_path, "train job.yaml --detach", streams, MARKER=str(tmp_path))
        assert code == 0, text
        assert "Traceback" not in text
        wait_until(lambda: not processes_of(tmp_path), timeout_s=60)
    finally:
        for process in processes_of(tmp_path):
            process.kill()
    assert [event.status for event in read_events_of(run.events, RunEnded)] == ["done"]
    assert losses(tmp_path) == LOSSES


_COMMANDS = ("validate job.yaml", "runs", "report runs/none", "schema", "--help", "plan job.yaml", "no")


@pytest.mark.parametrize("words", _COMMANDS)
def test_other_commands(tmp_path: Path, words: str) -> None:
    write_job(tmp_path)
    expected, _ = in_shell(tmp_path, words, "")
    for streams in (">&-", ">&- 2>&- <&-"):
        code, text = in_shell(tmp_path, words, streams)
        assert code == expected, text
        assert "Traceback" not in text


def in_bash(folder: Path, line: str) -> tuple[int, str]:
    """Exit code and output of a line in which D is the command; a pipe ends with the code of what failed in it."""
    done = run_command(
        cwd=folder, start=["bash", "-o", "pipefail", "-c", line.replace("D ", f"{shlex.join(command())} ")]
    )
    return done.code, done.text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("D schema | true", 0),
        ("D --help | true", 0),
        ("D plan job.yaml --no-variables | true", 0),
        ("D validate job.yaml none.yaml | true", 2),
        ("D validate job.yaml > /dev/full", 3),
        ("D validate none.yaml > /dev/full 2>&1", 2),
        ("D validate none.yaml 2> /dev/full", 2),
        ("D run --json true > /dev/full", 0),
        ("D run --json false > /dev/full", 3),
        pytest.param("D train job.yaml --json | head -1", 0, marks=_SLOW),
        pytest.param("D train job.yaml --json > /dev/full", 0, marks=_SLOW),
        pytest.param("D verify job.yaml --steps 3 --replicas 2 --strategies mirrored | true", 0, marks=_SLOW),
    ],
)
def test_output_that_cannot_be_written(tmp_path: Path, line: str, expected: int) -> None:
    write_job(tmp_path)
    code, text = in_bash(tmp_path, line)
    assert code == expected, text
    assert "Traceback" not in text
    is_told = "/dev/full" in line and "none.yaml" not in line
    assert ("error: standard output: No space left on device" in text) == is_told


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("D validate - < job.yaml", "-: ok"),
        ("cat job.yaml | D validate /dev/stdin", "/dev/stdin: ok"),
        ("D validate <(cat job.yaml)", "ok"),
        ("mkfifo f.yaml; cat job.yaml > f.yaml & D validate <(cat job.yaml) f.yaml; wait", "f.yaml: ok"),
        ("cat job.yaml | D plan - --no-variables --name piped", "runs/piped"),
        ("(echo name: told; cat job.yaml) | D plan - --no-variables", "runs/told"),
    ],
)
def test_a_config_from_a_pipe(tmp_path: Path, line: str, expected: str) -> None:
    write_job(tmp_path)
    code, text = in_bash(tmp_path, line)
    assert code == 0, text
    assert expected in text


def test_a_run_of_a_config_from_a_pipe(tmp_path: Path) -> None:
    write_job(tmp_path)
    code, text = in_bash(tmp_path, "cat job.yaml | D train - --name piped -q")
    assert code == 0, text
    assert losses(tmp_path, "piped") == LOSSES


@pytest.mark.parametrize("words", ["train -", "plan - --no-variables", "train - --name a/b", "plan - --name ''"])
def test_a_name_is_asked_for(tmp_path: Path, words: str) -> None:
    write_job(tmp_path)
    code, text = in_bash(tmp_path, f"cat job.yaml | D {words}")
    assert code == 2, text
    assert "error: --name:" in text
    assert not (tmp_path / "runs").exists()


_NAMES = ("a:b", "*[x]?", "[red]x[/red]", "{a}", "\x1b[31m", " -x", "é☃", "'\"$HOME`")


@pytest.mark.parametrize("name", [pytest.param(name, marks=_SLOW) for name in ("two\nlines", *_NAMES)])
def test_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    write_job(folder)
    for words in (("train", "job.yaml"), ("report", "runs/job")):
        done = run_command(*words, cwd=folder)
        assert done.code == 0, done.text
        assert "Traceback" not in done.text
    assert losses(folder)[:2] == LOSSES


@pytest.mark.parametrize("words", [("validate", "job.yaml"), ("train", "job.yaml")])
def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path, words: tuple[str, ...]) -> None:
    folder = tmp_path / "a\udcff"
    write_job(folder)
    done = run_command(*words, cwd=folder)
    assert done.code == 2
    assert "has a name that is not UTF-8; rename it" in done.err
    assert "Traceback" not in done.text


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; exec {shlex.join(command())} runs"
    done = run_command(cwd=tmp_path, start=["sh", "-c", line])
    assert done.code == 2
    assert done.err == "error: the current directory cannot be used (No such file or directory); change to another\n"
