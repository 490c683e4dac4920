"""Engines of other packages: found by their entry points, and named with their package if they cannot be used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from distlaunch.config.engines import GROUP, installed, load_kinds

EXAMPLE = Path(__file__).parents[1] / "plugins" / "nice_engine.py"
OURS = tuple(entry_points(group=GROUP))
SECTION = (Path(__file__).parent / "user_code" / "installed_engines.py").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config, and a module of an engine that is not installed yet."""
    (tmp_path / "tent.py").write_text(SECTION)
    (tmp_path / "mine.py").write_text("def model(): ...\ndef data(): ...\n")
    data = '{function: "mine.py:data", global_batch: 8}'
    (tmp_path / "job.yaml").write_text(
        f'model: {{function: "mine.py:model"}}\ndata: {data}\nengine: {{kind: tent, poles: 3}}\n'
    )
    return tmp_path


def install(folder: Path, name: str, points: str) -> None:
    """Make what pip leaves of a package, in a folder on the path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")


def call(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(project)}
    command = [sys.executable, "-P", "-m", "distlaunch", *words]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=60)


def test_an_engine_of_another_package_is_used(project: Path) -> None:
    install(project, "tents", "tent = tent:Tent")
    assert call(project, "validate", "job.yaml").returncode == 0
    planned = call(project, "plan", "job.yaml", "--no-variables")
    assert planned.returncode == 0, planned.stderr
    wrong = call(project, "validate", "job.yaml", "--set", "engine.pole=1")
    assert "engine.pole: unknown key; did you mean 'poles'?" in wrong.stderr
    assert '"How many poles it has."' in call(project, "schema").stdout


def test_its_tasks_run_as_it_starts_them(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    install(tmp_path, "nice-engine", "nice = nice_engine:Nice")
    (tmp_path / "job.py").write_text("import os; print('level', os.nice(0))")
    level = os.nice(0) + 7
    done = call(tmp_path, "run", "--set", "engine.kind=nice", "--set", "engine.level=7", "--workers", "2", "job.py")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(f"level {min(level, 19)}") == 2


def test_one_that_is_not_installed_or_is_broken_is_named(project: Path) -> None:
    assert "expected one of 'auto', 'local', 'ssh', 'slurm'" in call(project, "validate", "job.yaml").stderr
    install(project, "tents", "tent = tent:Nothing")
    said = call(project, "validate", "job.yaml").stderr
    reason = "the package tents provides it, but tent:Nothing cannot be used: "
    assert f"job.yaml:3: engine.kind: got 'tent': {reason}" in said
    assert call(project, "validate", "job.yaml", "--set", "engine={kind: local}").returncode == 0


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ("tent = tent:Unnamed", "TypeError: expected the annotation `kind: Literal['tent']`, received ('another',)"),
        ("empty = tent:Empty", "TypeError: expected the class variable `implementation`"),
        ("tent = tent:make", "TypeError: expected a subclass of distlaunch.config.engines.base.EngineSection"),
        ("tent = nowhere:Tent", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(
    project: Path, monkeypatch: pytest.MonkeyPatch, point: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(project)
    name, _, value = point.partition(" = ")
    classes, unusable = load_kinds([*OURS, EntryPoint(name, value, GROUP)])
    assert reason in unusable[name]
    assert tuple(classes) == tuple(installed().models)
    sys.modules.pop("tent", None)


def test_two_packages_with_one_kind_are_both_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    points = [EntryPoint("tent", value, GROUP) for value in ("tent:Tent", "other:Tent")]
    classes, unusable = load_kinds([*OURS, *points])
    assert unusable["tent"] == "the packages other and tent both provide it; uninstall one of them" or (
        unusable["tent"] == "the packages tent and other both provide it; uninstall one of them"
    )
    assert tuple(classes) == tuple(installed().models)
    sys.modules.pop("tent", None)


def test_an_unknown_engine_hides_no_other_mistake(project: Path) -> None:
    """Other mistakes are reported beside an unknown engine, but not the keys that were written for that engine."""
    said = call(project, "validate", "job.yaml", "--set", "compile.optimizer=admm").stderr
    assert "compile.optimizer: got 'admm'; expected a name of keras.optimizers" in said
    assert said.count("engine.") == 1, said
