"""Tests of the checks of this machine: ports, folders, and packages that callbacks import."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from distlaunch.base.errors import UsageError
from distlaunch.cluster.ports import reserve_ports
from distlaunch.config.checks.machine import busy_ports, machine_problems, runs_dir_problems
from distlaunch.config.read.load import load_config
from distlaunch.config.references import keras_names
from distlaunch.config.run import RunConfig
from tests.unit.config_files import BASE, write_models


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path)
    return tmp_path


def config(extra: str, *overrides: str) -> RunConfig:
    Path("run.yaml").write_text(BASE + extra)
    return load_config("run.yaml", overrides).config


def test_a_busy_port_is_told_as_the_start_of_a_run_tells_it(folder: Path) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        found = config(f"strategy: {{kind: multi_worker_mirrored}}\ncluster: {{workers: 1, ports: [{port}]}}\n")
        problems = list(busy_ports(found))
        with pytest.raises(UsageError) as refused:
            reserve_ports([port])
    assert [problem.dotted for problem in problems] == ["cluster.ports[0]"]
    assert problems[0].message.startswith(f"port {port} is in use by process {os.getpid()} (")
    assert str(refused.value) == f"cluster.ports: {problems[0].message}"
    assert not list(busy_ports(found))


def test_a_file_in_the_way(folder: Path) -> None:
    Path("taken").touch()
    problem = next(runs_dir_problems(config("", "runs_dir=taken/runs")))
    assert f"{folder}/taken is a file" in problem.message


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(folder: Path) -> None:
    Path("locked").mkdir(mode=0o500)
    problem = next(runs_dir_problems(config("", "runs_dir=locked/runs")))
    assert "is not writable" in problem.message


def test_packages_that_callbacks_import_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras_names, "IMPORTS", {"CSVLogger": "nowhere_to_be_found", "History": "json"})
    given = config("train:\n  callbacks:\n    - {name: History}\n    - {name: csv_logger, args: {filename: log.csv}}\n")
    [problem] = machine_problems(given)
    assert problem.key == ("train", "callbacks", 1, "name")
    assert problem.message.endswith("which is not installed: pip install nowhere_to_be_found")
