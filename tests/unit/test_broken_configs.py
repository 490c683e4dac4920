"""Every mistake is reported with its line, its key and a remedy, and nothing else is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distlaunch.base.errors import ConfigError
from distlaunch.config.read.load import load_config
from tests.unit.broken_configs import ALL, Broken
from tests.unit.config_files import write_models

JARGON = re.compile(
    r"Input should|pydantic|union_tag|Traceback|<class|Error\b|NoneType|constrained|\bstr\b|\bint\b|validation error"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_models(tmp_path)
    return tmp_path


def test_the_ids_differ() -> None:
    assert len({case.id for case in ALL}) == len(ALL)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_message(case: Broken, folder: Path) -> None:
    Path("run.yaml").write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", environ={})
    text = str(caught.value)
    assert len(caught.value.problems) == 1, text
    problem = caught.value.problems[0]
    assert case.key in problem.dotted
    assert case.line is None or problem.source == f"run.yaml:{case.line}", text
    assert text.startswith("run.yaml")
    assert "\n" not in text
    for words in case.words:
        assert words in text, text
    assert not JARGON.search(text), text


def test_all_mistakes_at_once(folder: Path) -> None:
    Path("run.yaml").write_text(
        "model: {function: models.py:nett}\n"
        "data: {function: models.py:data, args: {sorce: x}, global_batch: no}\n"
        "train: {epochs: '3'}\ncompile: {optimizer: admm}\nseed: ${NOT_SET}\nseed: 4\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", environ={})
    assert [(problem.source, problem.dotted) for problem in caught.value.problems] == [
        ("run.yaml:5", "seed"),
        ("run.yaml:6", "seed"),
        ("run.yaml:1", "model.function"),
        ("run.yaml:2", "data.global_batch"),
        ("run.yaml:2", "data.args.sorce"),
        ("run.yaml:3", "train.epochs"),
        ("run.yaml:4", "compile.optimizer"),
    ]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rum.yaml", "did you mean 'run.yaml'?"),
        (".", "this is a folder"),
        ("nowhere/run.yaml", "no folder nowhere"),
        ("models.py/run.yaml", "no such file"),
    ],
)
def test_paths(path: str, words: str, folder: Path) -> None:
    Path("run.yaml").write_text("")
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(path)


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"run.yaml: permission denied; .*chmod"):
        load_config("run.yaml")
