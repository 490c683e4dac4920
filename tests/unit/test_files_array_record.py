"""ArrayRecord files by number."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.data import RecordError, array_record

module = pytest.importorskip("array_record.python.array_record_module")
pytestmark = pytest.mark.usefixtures("virtual_devices", "index_cache")


def write(path: Path, start: int, stop: int, options: str = "group_size:1") -> Path:
    writer = module.ArrayRecordWriter(str(path), options)
    for number in range(start, stop):
        writer.write(b"record %d" % number)
    writer.close()
    return path


def test_records_of_several_files_in_any_order_and_by_threads(tmp_path: Path) -> None:
    write(tmp_path / "a.array_record", 0, 30)
    (tmp_path / "b.array_record").write_bytes(b"")
    write(tmp_path / "c.array_record", 30, 100, "group_size:16")
    source = array_record(tmp_path)
    assert len(source) == 100

    def read(seed: int) -> bool:
        order = np.random.default_rng(seed).integers(0, 100, 50)
        return source.read(order)[0].tolist() == [b"record %d" % index for index in order]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(20)))
    child = os.fork()
    if child == 0:  # pytest must not go on in it
        os._exit(0 if read(1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert source[-1] == b"record 99"
    assert source.where(31) == f"{tmp_path}/c.array_record, record 1"


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.array_record", 0, 5), write(tmp_path / "b.array_record", 5, 10)
    source = array_record(tmp_path)
    content = second.read_bytes()
    first.unlink()
    second.write_bytes(content[:-1])
    with pytest.raises(RecordError, match=r"example 3 .*a.array_record, record 3\): the file has vanished"):
        source.read(np.array([3]))
    with pytest.raises(RecordError, match=r"example 7 .*b.array_record, record 2\): the file was truncated"):
        source.read(np.array([7]))
    with pytest.raises(DataError, match=r"b.array_record cannot be read as an ArrayRecord file"):
        array_record(second)
    damaged = bytearray(content)
    place = content.index(b"record 7") if b"record 7" in content else len(content) // 4
    damaged[place] ^= 1
    second.write_bytes(damaged)
    with pytest.raises(RecordError, match=r"example 2 .*b.array_record, record 2"):
        array_record(second).read(np.array([2]))


def test_the_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    with pytest.raises(ConfigError, match=r"pip install 'distlaunch\[grain\]'"):
        array_record(write(tmp_path / "a.array_record", 0, 1))
