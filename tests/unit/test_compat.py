"""Tests of the framework versions that count as tested, and of the message about other versions."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest

from distlaunch.agent.remote.host_facts import COMPARED
from distlaunch.base.compat import TESTED, Range, frameworks, install_command, installed, untested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "inside"),
    [("3.15.0", True), ("3.15.1.dev3", True), ("3.16.0rc1", True), ("3.14.9", False), ("3.17", False), ("4.15", False),
     ("nightly", False), ("", False)],
)  # fmt: skip
def test_a_range_goes_by_series(version: str, inside: bool) -> None:
    assert Range((3, 15), (3, 17)).includes(version) is inside


@pytest.mark.parametrize("package", TESTED)
def test_pip_installs_what_is_tested(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["jax"]]
    assert f"{package}{TESTED[package]}" in wanted
    assert TESTED[package].includes(installed(package) or "")
    assert install_command(package) == f"pip install '{package}{TESTED[package]}'"


def test_the_installed_versions_are_tested() -> None:
    assert untested(TESTED) == []


def test_an_untested_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found as pip leaves it, and not by importing it."""
    (tmp_path / "keras-9.1.2.dist-info").mkdir()
    (tmp_path / "keras-9.1.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 9.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    tested = f"keras{TESTED['keras']}"
    assert untested(frameworks("tensorflow")) == [
        f"keras 9.1.2 is installed; this distlaunch is tested with {tested}; "
        f"in case of problems, install a tested version: pip install '{tested}'"
    ]


def test_tensorflow_may_be_the_build_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorflow_cpu-2.21.3.dist-info").mkdir()
    (tmp_path / "tensorflow_cpu-2.21.3.dist-info/METADATA").write_text("Name: tensorflow-cpu\nVersion: 2.21.3\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert installed("tensorflow") == "2.21.3"
    assert untested(["tensorflow"]) == []


@pytest.mark.parametrize("package", [*COMPARED, "scikit-learn", "ruamel.yaml", "ruamel", "no-such-package"])
def test_a_version_is_the_one_that_python_finds(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scikit_learn-1.5.0rc1", "ruamel_yaml_clib-0.2", "ruamel.yaml-0.18+local", "keras_hub-0.1"):
        (tmp_path / f"{name}.dist-info").mkdir()
        words = name.partition("-")
        text = f"Metadata-Version: 2.1\nName: {words[0]}\nVersion: {words[2]}\n"
        (tmp_path / f"{name}.dist-info/METADATA").write_text(text)
    (tmp_path / "archive.zip").write_bytes(b"")
    monkeypatch.setattr("sys.path", [str(tmp_path), str(tmp_path / "archive.zip"), "/no/such/folder", *sys.path])
    try:
        expected = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        expected = None
    assert installed(package) == expected


def test_jax_counts_only_where_it_is_used() -> None:
    assert "jax" in frameworks("jax")
    assert "jax" not in frameworks("tensorflow")


def test_a_framework_that_is_not_installed_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert installed("jax") is None
    assert untested(TESTED) == []
