"""Code that is sent to hosts: what is there already is never overwritten by accident."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from distlaunch.agent.remote.code_copy import CodeCopy, digest_of
from distlaunch.agent.remote.file_transfer import receive
from distlaunch.agent.remote.frames import FrameReader
from distlaunch.base.errors import UsageError
from distlaunch.engines.remote.code import CodeFiles


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "model.py").write_text("a = 1\n")
    (folder / "notes.txt").write_text("x")
    (folder / ".hidden").write_text("x")
    (folder / "runs").mkdir()
    (folder / "runs" / "old.py").touch()
    return folder


def _send(code: CodeFiles, to: Path) -> CodeCopy:
    copy = CodeCopy(to, json.loads(code.listing()))
    if not copy.is_same:
        for data in code.messages():
            for frame in FrameReader().feed(data):
                receive(to, frame)
    copy.commit()
    return copy


def test_all_but_hidden_files_and_runs_are_code(project: Path) -> None:
    assert json.loads(CodeFiles(project, []).listing()).keys() == {"package/model.py", "notes.txt"}
    assert json.loads(CodeFiles(project, ["/other/f.py"]).digests_as_json(outside=True)).keys() == {
        "package/model.py",
        "/other/f.py",
    }


def test_of_a_repository_it_is_what_git_knows(project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("notes.txt\nruns\n")
    assert json.loads(CodeFiles(project, []).listing()).keys() == {"package/model.py", ".gitignore", ".hidden"}


def test_code_is_put_there_and_brought_up_to_date(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    _send(CodeFiles(project, []), there).close()
    assert (there / "package" / "model.py").read_text() == "a = 1\n"
    (there / "result.txt").write_text("of a job")
    (project / "package" / "model.py").write_text("a = 2\n")
    (project / "notes.txt").unlink()
    copy = _send(CodeFiles(project, []), there)
    assert (there / "package" / "model.py").read_text() == "a = 2\n"
    assert not (there / "notes.txt").exists()
    # nobody has sent it
    assert (there / "result.txt").exists()
    # the same once more: nothing to send
    again = CodeCopy(there, json.loads(CodeFiles(project, []).listing()))
    assert again.is_same
    for each in (copy, again):
        each.close()


def test_other_code_is_not_touched(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.py").write_text("b = 1\n")
    with pytest.raises(UsageError, match="holds other code"):
        _send(CodeFiles(project, []), there)
    assert [path.name for path in there.iterdir()] == ["mine.py"]


def test_code_that_a_job_works_with_is_not_changed(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    first = _send(CodeFiles(project, []), there)
    same = _send(CodeFiles(project, []), there)
    (project / "notes.txt").write_text("changed")
    with pytest.raises(UsageError, match="another job works with other code"):
        _send(CodeFiles(project, []), there)
    for each in (first, same):
        each.close()
    _send(CodeFiles(project, []), there).close()
    assert digest_of(there / "notes.txt") == digest_of(project / "notes.txt")


def test_code_outside_the_folder_cannot_be_sent(project: Path) -> None:
    with pytest.raises(UsageError, match="is not in"):
        CodeFiles(project, ["/other/f.py"]).listing()
