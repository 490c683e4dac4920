"""Paths in `data.args` and `model.args` start from the config's folder, wherever a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distlaunch.config.read.load import load_config
from distlaunch.config.references.argument_paths import with_argument_paths
from distlaunch.config.run import RunConfig

MINE = "def data(**args):\n    pass\n\n\ndef model(**args):\n    pass\n"
CONFIG = """
model: {function: "mine.py:model", args: {words: words.txt, layers: [{table: sub/table.csv}], activation: relu}}
data: {function: "mine.py:data", global_batch: 8, args: {files: "part-*.csv", root: sub, split: train, url: "s3://a/b"}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    for name in ("words.txt", "sub/table.csv", "part-1.csv"):
        (folder / name).write_text("x")
    (folder / "mine.py").write_text(MINE)
    (folder / "c.yaml").write_text(CONFIG)
    (tmp_path / "elsewhere").mkdir()
    return folder


def args(config: RunConfig) -> dict[str, Any]:
    return {**config.model.args, **config.data.args}


def test_in_the_folder_itself_nothing_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = load_config("c.yaml", environ={}).config
    resolved, notes = with_argument_paths(config)
    assert (args(resolved), notes) == (args(config), [])


def test_elsewhere_what_is_in_the_folder_is_found_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent / "elsewhere")
    (Path.cwd() / "words.txt").write_text("another")
    config, notes = with_argument_paths(load_config(folder / "c.yaml", environ={}).config)
    assert args(config) == {
        "words": str(folder / "words.txt"),
        "layers": [{"table": str(folder / "sub/table.csv")}],
        "activation": "relu",
        "files": str(folder / "part-*.csv"),
        "root": str(folder / "sub"),
        "split": "train",
        "url": "s3://a/b",
    }
    assert notes == []
    assert config.folder == folder, "for those that resume it"


def test_what_only_this_directory_has_is_used_with_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent / "elsewhere")
    (folder / "words.txt").rename("words.txt")
    Path("train").mkdir()
    config, notes = with_argument_paths(load_config(folder / "c.yaml", environ={}).config)
    assert (config.model.args["words"], config.data.args["split"]) == ("words.txt", "train")
    [note] = notes
    assert note.startswith(
        f"model.args.words: 'words.txt' is not in the config's folder, {folder}, but in this directory"
    )


def test_a_run_that_was_started_elsewhere_finds_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = folder.parent / "elsewhere"
    (folder / "words.txt").rename(started / "words.txt")
    monkeypatch.chdir(folder.parent)
    config, notes = with_argument_paths(load_config(folder / "c.yaml", environ={}).config, started)
    assert config.model.args["words"] == str(started / "words.txt")
    assert notes == []


@pytest.mark.parametrize("text", ["", "a" * 5_000, "a\nb", "\0", "[", "~/x", "${x}", "part-[", "%s/x"])
def test_any_text_may_be_an_argument(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    plain = {"model": {"function": "m:f", "args": {"text": text}}, "data": {"function": "m:f", "global_batch": 1}}
    config = RunConfig.model_validate(plain).in_folder(folder)
    assert with_argument_paths(config) == (config, [])
