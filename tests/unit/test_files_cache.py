"""The cache of indices, and which files patterns mean."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.cache_dir import cache_directory
from distlaunch.base.errors import ConfigError, DataError
from distlaunch.data import text_lines
from distlaunch.data.files import index_cache as cache
from distlaunch.data.files import records  # fmt: skip
from distlaunch.data.files import text_lines as lines_module

pytestmark = pytest.mark.usefixtures("virtual_devices")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "distlaunch" / "indices"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    return folder


def read(folder: Path) -> list[bytes]:
    source = text_lines(folder)
    return source.read(np.arange(len(source)))[0].tolist()


LINES = [b"a1", b"a2", b"b1", b"b2"]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that were scanned."""
    seen: list[int] = []
    scan = lines_module.scan

    def watched(descriptor: int, size: int) -> records.Scanned:
        seen.append(size)
        return scan(descriptor, size)

    monkeypatch.setattr(lines_module, "scan", watched)
    return seen


def test_an_index_is_made_once_and_anew_for_changed_files(data: Path, kept: Path, scans: list[int]) -> None:
    assert read(data) == read(data) == LINES
    assert len(scans) == 2
    (data / "a.txt").write_text("a1\na3\n")
    os.utime(data / "a.txt", (1, 1))
    assert read(data) == [b"a1", b"a3", b"b1", b"b2"]
    assert len(scans) == 4


def test_indices_that_nobody_uses_are_removed(data: Path, kept: Path) -> None:
    read(data)
    (first,) = kept.iterdir()
    os.utime(first, (1, 1))
    assert read(data) == LINES
    text_lines(data / "a.txt")
    assert len(list(kept.iterdir())) == 2, "the first was used again"
    os.utime(first, (1, 1))
    text_lines(data / "b.txt")
    assert not first.exists()


@pytest.mark.parametrize("damage", ["shorter", "longer", "empty", "flipped", "text", "objects"])
def test_a_damaged_index_is_made_anew(data: Path, kept: Path, scans: list[int], damage: str) -> None:
    read(data)
    (path,) = kept.iterdir()
    content = path.read_bytes()
    flipped = bytes([content[-1] ^ 1])
    damaged = {"shorter": content[:-3], "longer": content + b"x", "empty": b"", "text": b"an index\n" * 99}
    path.write_bytes(damaged.get(damage, content[:-1] + flipped))
    if damage == "objects":
        np.save(path.open("wb"), np.array([{}], object), allow_pickle=True)
    assert read(data) == LINES
    assert len(scans) == 4
    assert read(data) == LINES
    assert len(scans) == 4, "the damaged one was replaced"


def test_indices_are_mapped_into_memory(data: Path) -> None:
    source = text_lines(data)
    assert isinstance(source.starts, np.memmap)
    assert source.starts.dtype == np.uint32


def test_read_only_data(data: Path) -> None:
    os.chmod(data, 0o555)
    try:
        assert read(data) == LINES
    finally:
        os.chmod(data, 0o755)


def test_a_cache_that_cannot_be_written(data: Path, kept: Path) -> None:
    kept.parent.parent.write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match=r"index of 2 files cannot be cached in .*; set XDG_CACHE_HOME"):
        assert read(data) == LINES


def test_a_full_disk_while_indexing(data: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", fail)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert read(data) == LINES
    assert list(kept.iterdir()) == [], "what was written of it is removed"


def test_no_home_is_no_cache(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    assert cache_directory("indices") is None
    assert read(data) == LINES
    monkeypatch.undo()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    assert cache_directory("indices") == Path("/nowhere/.cache/distlaunch/indices")


def test_several_may_index_at_once(data: Path, kept: Path) -> None:
    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("error")
        assert all(found == LINES for found in pool.map(lambda _: read(data), range(40)))
    assert [path.suffix for path in kept.iterdir()] == [".index"]


def test_a_file_that_is_written_while_it_is_indexed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = lines_module.scan

    def grow(descriptor: int, size: int) -> records.Scanned:
        with (data / "a.txt").open("a") as file:
            file.write("more\n")
        return scan(descriptor, size)

    monkeypatch.setattr(lines_module, "scan", grow)
    with pytest.raises(DataError, match=r"a\.txt cannot be indexed while it is written: .*6 bytes .* now"):
        text_lines(data)


def test_patterns(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "more").mkdir()
    (data / "more" / "c[1].txt").write_text("c\n")
    (data / ".hidden.txt").write_text("no\n")
    (data / "notes.md").write_text("no\n")
    b, a = data / "b.txt", str(data / "a.txt")
    assert read(data) == LINES
    assert text_lines([b, a, f"{data}/*.txt"]).files.names == ("a.txt", "b.txt")
    assert text_lines(f"{data}/**/*.txt").files.names == ("a.txt", "b.txt", "more/c[1].txt")
    assert text_lines(data / "more" / "c[1].txt").files.names == ("c[1].txt",)
    monkeypatch.chdir(data)
    assert text_lines("a.txt").where(1) == f"{data}/a.txt, record 1 at byte 3"
    for wrong, message in (
        ("c.txt", r"no such file or directory: 'c.txt' \(looked for /"),
        ("c*.txt", r"no file matches 'c\*.txt'"),
        ([], "empty list"),
        ("gs://bucket/a", "expected files in a file system"),
    ):
        with pytest.raises(ConfigError, match=message):
            text_lines(wrong)
    (data / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"empty has no file named \*.txt or \*.text; .* such as '.*/empty/\*\*/\*.txt'"
    ):
        text_lines(data / "empty")
    (data / "d.txt.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"d.txt.gz is compressed as a whole, .*'gunzip'"):
        text_lines(data)
    os.mkfifo(data / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        text_lines(data / "pipe")


def test_the_helpers_are_imported_when_they_are_used() -> None:
    code = "import sys, distlaunch.data; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    import distlaunch.data as helpers

    assert all(callable(getattr(helpers, name)) for name in helpers.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tsv'"):
        _ = helpers.tsv
