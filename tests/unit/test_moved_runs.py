"""Runs whose code lies elsewhere now."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from distlaunch.base.run_dir import RunDir
from distlaunch.config.read.load import dump_config, load_config, load_resolved
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.references.moved import find_moved
from distlaunch.jobs.environment import describe_environment

_CODE = "def model(path=''): ...\ndef data(): ...\n"
_CONFIG = """
model: {function: code/mine.py:model, args: {path: x.csv}}
data: {function: code/mine.py:data, global_batch: 1}
train: {callbacks: [{name: "code/mine.py:model"}]}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code, config and a run that was started in another folder."""
    folder = tmp_path / "a"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "mine.py").write_text(_CODE)
    (folder / "x.csv").touch()
    (folder / "job.yaml").write_text(_CONFIG)
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    run = RunDir(folder / "runs" / "job")
    run.path.mkdir(parents=True)
    config, _ = with_argument_paths(load_config(folder / "job.yaml").config)
    assert config.model.args["path"] == str(folder / "x.csv")
    run.config.write_text(dump_config(config))
    run.environment.write_text(json.dumps(describe_environment([], config.folder, run.path)))
    return folder


def test_a_run_that_stays(project: Path) -> None:
    run = RunDir(project / "runs" / "job")
    found = find_moved(load_resolved(run.config), run)
    assert (found.values, found.note, found.problems, found.folder) == ({}, "", [], project)


@pytest.mark.parametrize("copies", [False, True])
def test_a_run_that_moves_with_its_code(project: Path, copies: bool) -> None:
    now = project.parent / "elsewhere" / "b"
    now.parent.mkdir()
    if copies:  # those that lie beside the run win
        shutil.copytree(project, now)
    else:
        project.rename(now)
    run = RunDir(now / "runs" / "job")
    found = find_moved(load_resolved(run.config), run)
    config = found.applied_to(load_resolved(run.config))
    assert config.model.function == f"{now}/code/mine.py:model"
    assert config.data.function == f"{now}/code/mine.py:data"
    assert config.train.callbacks[0].name == f"{now}/code/mine.py:model"
    assert config.model.args == {"path": str(now / "x.csv")}
    assert found.folder == now
    assert found.note == f"the run was moved: its code is taken from {now}/code"
    assert not found.problems


def test_a_run_that_moves_alone(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(project.parent / "job")
    (project / "runs" / "job").rename(run.path)
    found = find_moved(load_resolved(run.config), run)
    assert (found.values, found.problems) == ({}, [])
    assert found.note == f"the run was moved without its code, which is taken from {project}/code"
    uid = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    message = find_moved(load_resolved(run.config), run).problems[0].message
    assert f"{project}/code/mine.py belongs to another user" in message


@pytest.mark.parametrize("moves", [False, True])
def test_code_that_is_gone(project: Path, moves: bool) -> None:
    run = RunDir(project.parent / "job") if moves else RunDir(project / "runs" / "job")
    if moves:
        (project / "runs" / "job").rename(run.path)
    shutil.rmtree(project / "code")
    found = find_moved(load_resolved(run.config), run)
    assert [each.dotted for each in found.problems] == ["model.function", "data.function", "train.callbacks[0].name"]
    for each in found.problems:
        assert f"--set {each.dotted}=PATH/mine.py:" in each.message
