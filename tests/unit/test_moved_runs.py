"""Runs whose code lies elsewhere now."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch import notebook
from distlaunch.base.errors import ConfigError
from distlaunch.base.protocol import MODULES_FOLDER
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.environment import describe_environment
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.spec import ClusterSpec
from distlaunch.config.differences import OF_THE_MODEL, differences
from distlaunch.config.read.load import dump_config, load_config, load_resolved
from distlaunch.config.read.load_run import load_run
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.references.moved import find_moved, is_moved
from distlaunch.config.run import RunConfig
from distlaunch.jobs.use import read_only_copy
from distlaunch.plan.train import plan_launch

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
    run.environment.write_text(json.dumps(describe_environment([], config.folder, run)))
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


_MODULES = """
model: {function: "package.mine:model"}
data: {function: "package.mine:data", global_batch: 1}
compile: {loss: mse}
"""


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package, from which a run was started."""
    folder = tmp_path / "p"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "mine.py").write_text(_CODE)
    (folder / "job.yaml").write_text(_MODULES)
    monkeypatch.chdir(folder)
    run = RunDir(folder / "runs" / "job")
    run.path.mkdir(parents=True)
    config = load_config(folder / "job.yaml").config
    run.config.write_text(dump_config(config))
    run.environment.write_text(json.dumps(describe_environment([], config.folder, run)))
    return folder


@pytest.mark.parametrize("overrides", [(), ("train.epochs=3",)])
def test_modules_of_a_run_that_moves(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    run = RunDir(packaged / "runs" / "job")
    found = load_run(run, overrides, Machine({}))
    assert (found.config.modules_folder, found.note) == (None, "")
    monkeypatch.chdir(tmp_path)
    found = load_run(run, overrides, Machine({}))  # which was not moved, but is used from another directory
    assert (found.config.modules_folder, found.note) == (packaged, "")
    now = tmp_path / "q"
    packaged.rename(now)
    run = RunDir(now / "runs" / "job")
    found = load_run(run, overrides, Machine({}))
    assert found.config.modules_folder == now
    assert found.config.model.function == "package.mine:model"
    assert found.note == "the run was moved: its code is taken from q"
    # started again from there, it knows the folder, not the directory
    environment = describe_environment([], found.config.folder, run, found.config.modules_folder)
    run.environment.write_text(json.dumps(environment))
    assert load_run(run, overrides, Machine({})).config.modules_folder == now
    assert environment["run_dirs"] == [str(run.path), str(packaged / "runs" / "job")]


def test_modules_of_a_run_that_moves_alone(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "job")
    (packaged / "runs" / "job").rename(run.path)
    monkeypatch.chdir(tmp_path)
    found = load_run(run, (), Machine({}))
    assert found.config.modules_folder == packaged
    assert found.note == "the run was moved without its code, which is taken from p"
    uid = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError) as raised:
        load_run(run, (), Machine({}))
    assert [each.dotted for each in raised.value.problems] == ["model.function", "data.function"]
    message = raised.value.problems[0].message
    assert "no module named 'package' in the current folder or Python's path" in message
    assert "add --set model.function=PATH/FILE.py:model, or set PYTHONPATH" in message
    (tmp_path / "other.py").write_text(_CODE)
    given = ("model.function=other.py:model", "data.function=other.py:data")
    assert load_run(run, given, Machine({})).config.model.function == f"{tmp_path}/other.py:model"


def test_a_task_of_a_run_that_moves_finds_its_modules(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(packaged / "job.yaml").config
    for folder, expected in ((None, None), (packaged, str(packaged))):
        plan = plan_launch(
            config.with_modules_in(folder), RunDir(packaged / "runs/job"), 0, "evaluate", ClusterSpec({})
        )
        assert plan.tasks[0].env.get(MODULES_FOLDER) == expected
    code = "import sys; from distlaunch.base.user_modules import begin_program, import_users; begin_program('x'); "
    code += "print(import_users('package.mine').__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd="/",
        env={**os.environ, MODULES_FOLDER: str(packaged)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{packaged}/package/mine.py\n", done.stderr


def test_what_has_moved_has_not_changed(project: Path, tmp_path: Path) -> None:
    before = load_resolved(RunDir(project / "runs" / "job").config)
    now = tmp_path / "elsewhere" / "b"
    now.parent.mkdir()
    project.rename(now)
    run = RunDir(now / "runs" / "job")
    moved = load_run(run, (), Machine({})).config

    def changed(config: RunConfig) -> list[str]:
        return differences(before.to_plain(), config.to_plain(), OF_THE_MODEL, lambda *texts: is_moved(*texts, run))

    assert before.model.function != moved.model.function
    assert changed(moved) == []
    (now / "other").mkdir()
    (now / "other" / "mine.py").write_text(_CODE)
    other = load_run(run, (f"model.function={now}/other/mine.py:model",), Machine({})).config
    assert changed(other) == [
        f'model.function: "{project}/code/mine.py:model" -> "{now}/other/mine.py:model"'
    ]  # fmt: skip
    # also after it was started in its new place, and in a copy that only leads to the run
    run.environment.write_text(json.dumps(describe_environment([], moved.folder, run)))
    assert changed(moved) == []
    run.checkpoints.mkdir()
    with read_only_copy(run) as copy:
        assert is_moved(before.model.function, moved.model.function, copy)


def test_a_notebook_finds_the_code_of_a_run_that_moves(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    now = tmp_path / "q"
    packaged.rename(now)
    with pytest.warns(UserWarning, match="the run was moved: its code is taken from q"):
        config = notebook.notebook_config(now / "runs" / "job", ())
    assert config.modules_folder == now
    assert str(now) in sys.path
    shutil.rmtree(now / "package")
    with pytest.raises(ConfigError, match=r"add --set model\.function=PATH/FILE"):
        notebook.notebook_config(now / "runs" / "job", ())


@pytest.mark.parametrize("place", [".", "..", "../elsewhere"])
def test_code_above_the_folder_of_the_config(project: Path, place: str) -> None:
    """`../code/mine.py` is the same file, whether the run lies where it was or was moved with its code."""
    (project / "configs").mkdir()
    config_file = project / "configs" / "job.yaml"
    config_file.write_text(_CONFIG.replace("code/", "../code/").replace("x.csv", "../x.csv"))
    config, _ = with_argument_paths(load_config(config_file).config)
    run = RunDir(project / "runs" / "job")
    run.config.write_text(dump_config(config))
    run.environment.write_text(json.dumps(describe_environment([], config.folder, run)))
    now = project
    if place != ".":
        now = Path(os.path.normpath(project / place / "moved"))
        shutil.copytree(project, now)
    run = RunDir(now / "runs" / "job")
    found = find_moved(load_resolved(run.config), run)
    assert (found.problems, bool(found.values)) == ([], place != ".")
    assert bool(found.note) == (place != ".")
    assert all(Path(value.partition(":")[0]).is_relative_to(now) for value in found.values.values())


def test_the_folder_of_tfds_moves_with_the_run(project: Path) -> None:
    run = RunDir(project / "runs" / "job")
    data = load_resolved(run.config).to_plain()
    data["data"] = {"tfds": {"name": "mnist", "data_dir": f"{project}/tfds"}, "global_batch": 1}
    config = RunConfig.model_validate(data)
    now = project.parent / "b"
    project.rename(now)
    moved = find_moved(config, RunDir(now / "runs" / "job")).applied_to(config)
    assert moved.data.tfds is not None
    assert moved.data.tfds.data_dir == str(now / "tfds")
