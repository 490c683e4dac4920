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
    code = CodeFiles(project, [])
    assert json.loads(code.listing()).keys() == {"package/model.py"}
    assert code.left_out == [".hidden"]
    subprocess.run(["git", "add", ".hidden"], cwd=project, check=True)
    assert json.loads(CodeFiles(project, []).listing()).keys() == {"package/model.py", ".hidden"}


def test_code_of_submodules_and_below_links_is_code(project: Path, tmp_path: Path) -> None:
    git = ("git", "-c", "protocol.file.allow=always", "-c", "user.name=me", "-c", "user.email=me@example.org")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "layers.py").touch()
    (project / "linked").symlink_to("package")
    (project / "elsewhere").symlink_to(tmp_path)
    for folder in (tmp_path / "library", project):
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        subprocess.run(["git", "add", "."], cwd=folder, check=True)
        subprocess.run([*git, "commit", "-qm", "all"], cwd=folder, check=True)
    subprocess.run([*git, "submodule", "--quiet", "add", tmp_path / "library", "lib"], cwd=project, check=True)
    sent = json.loads(CodeFiles(project, []).listing()).keys()
    assert {"lib/layers.py", "linked/model.py"} <= sent
    assert not [name for name in sent if name.startswith("elsewhere")]


def test_more_files_than_code_has_are_not_cut_off(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlaunch.engines.remote.code._MAX_FILES", 2)
    for name in ("a.txt", "b.txt", "z.py"):
        (project / name).touch()
    compared = CodeFiles(project, [str(project / "z.py")]).digests_as_json(outside=False)
    assert "z.py" in json.loads(compared), "the config names it"
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run(["git", "add", "."], cwd=project, check=True)
    assert {"package/model.py", "z.py"} <= json.loads(CodeFiles(project, []).digests_as_json(outside=False)).keys()
    with pytest.raises(UsageError, match=r"has \d files; the limit is 2"):
        CodeFiles(project, []).listing()


def test_a_repository_that_git_cannot_read_is_not_sent_whole(project: Path) -> None:
    (project / ".git").mkdir()
    (project / ".git" / "HEAD").touch()
    (project / "secret.yaml").touch()
    code = CodeFiles(project, [])
    with pytest.raises(UsageError, match=r"git cannot read the repository of .*project"):
        code.listing()
    code.digests_as_json(outside=False)


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
    with pytest.raises(UsageError, match="contains other code"):
        _send(CodeFiles(project, []), there)
    assert [path.name for path in there.iterdir()] == ["mine.py"]


def test_code_that_a_job_works_with_is_not_changed(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    first = _send(CodeFiles(project, []), there)
    same = _send(CodeFiles(project, []), there)
    (project / "notes.txt").write_text("changed")
    with pytest.raises(UsageError, match="another job uses other code"):
        _send(CodeFiles(project, []), there)
    for each in (first, same):
        each.close()
    _send(CodeFiles(project, []), there).close()
    assert digest_of(there / "notes.txt") == digest_of(project / "notes.txt")


def test_code_outside_the_folder_cannot_be_sent(project: Path) -> None:
    with pytest.raises(UsageError, match="is outside of"):
        CodeFiles(project, ["/other/f.py"]).listing()


def test_files_that_look_like_secrets_stay_here(project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / "tracked.pem").write_text("x")
    subprocess.run(["git", "add", "tracked.pem"], cwd=project, check=True)
    for name in (".env.local", "id_rsa", "package/host.key", "identity.py", ".aws/credentials", ".aws/config"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x")
    code = CodeFiles(project, [])
    sent = json.loads(code.listing()).keys()
    assert {"tracked.pem", "identity.py"} <= sent
    assert code.left_out == [".aws/", ".env.local", ".hidden", "id_rsa", "package/host.key"]
    assert sent.isdisjoint([*code.left_out, ".aws/credentials", ".aws/config"])
    more = CodeFiles(project, [], ["id_rsa"])
    assert "id_rsa" in json.loads(more.listing())
    assert "id_rsa" not in more.left_out
    with pytest.raises(UsageError, match=r"engine\.sync_files: there is no file .*missing"):
        CodeFiles(project, [], ["missing"]).listing()


def test_runs_are_not_code_wherever_they_are(project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    run = project / "experiments" / "best"
    (run / "attempts").mkdir(parents=True)
    (run / "events.jsonl").touch()
    (run / "attempts" / "plan.json").touch()
    (project / "experiments" / "sweep.py").touch()
    sent = json.loads(CodeFiles(project, []).listing()).keys()
    assert "experiments/sweep.py" in sent
    assert not [name for name in sent if name.startswith("experiments/best")]


def test_a_link_that_leads_out_is_refused_by_name(project: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("x")
    (project / "inside.py").symlink_to(project / "package" / "model.py")
    CodeFiles(project, []).listing()
    (project / "outside.py").symlink_to(tmp_path / "private")
    with pytest.raises(UsageError, match=r"outside\.py is a link to .*private.*, outside .*project"):
        CodeFiles(project, []).listing()
    # where nothing is sent, nothing is refused
    CodeFiles(project, []).digests_as_json(outside=False)


def test_nobody_else_reads_a_copy_and_programs_stay_programs(project: Path, tmp_path: Path) -> None:
    (project / "start.sh").write_text("x")
    (project / "start.sh").chmod(0o755)
    there = tmp_path / "there"
    _send(CodeFiles(project, []), there).close()
    assert there.stat().st_mode & 0o777 == 0o700
    assert (there / "start.sh").stat().st_mode & 0o777 == 0o700
    assert (there / "notes.txt").stat().st_mode & 0o777 == 0o600


def test_programs_that_a_repository_names_are_not_started(project: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    monitor = tmp_path / "monitor.sh"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    monitor.chmod(0o755)
    subprocess.run(["git", "config", "core.fsmonitor", str(monitor)], cwd=project, check=True)
    CodeFiles(project, []).listing()
    assert not (tmp_path / "started").exists()
