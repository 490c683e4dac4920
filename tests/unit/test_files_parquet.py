"""Parquet files by row groups."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.data import RecordError, parquet
from distlaunch.data.files.tables import row_groups
from distlaunch.data.files.tables.row_groups import RowGroupCache

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("virtual_devices", "index_cache")


def write(path: Path, start: int, stop: int, **more: Any) -> Path:
    rows = range(start, stop)
    columns = {
        "i": pa.array(rows, pa.int32()),
        "f": pa.array([None if row % 5 == 0 else row / 2 for row in rows], pa.float64()),
        "t": pa.array([None if row % 7 == 0 else f"text {row}" for row in rows]),
        "d": pa.array([f"kind {row % 2}" for row in rows]).dictionary_encode(),
        "v": pa.array([[row, row + 1] for row in rows], pa.list_(pa.float32(), 2)),
        **more,
    }
    pq.write_table(pa.table(columns), path, row_group_size=7, write_page_checksum=True)
    return path


def test_rows_of_several_files_in_any_order(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 20)
    write(tmp_path / "b.parquet", 20, 20)
    write(tmp_path / "c.parquet", 20, 50)
    source = parquet(tmp_path, label="i")
    assert [spec.dtype.name for spec in source.raw_spec] == ["float64", "string", "string", "float32", "int32"]
    order = np.random.default_rng(0).permutation(50).repeat(2)
    f, t, d, v, i = source.read(order)
    assert i.tolist() == order.tolist()
    np.testing.assert_array_equal(f, np.where(order % 5 == 0, np.nan, order / 2))
    assert t.tolist() == [b"" if row % 7 == 0 else b"text %d" % row for row in order]
    assert d.tolist() == [b"kind %d" % (row % 2) for row in order]
    assert v.tolist() == [[row, row + 1] for row in order]
    assert [part.shape for part in source.read(order[:0])] == [(0,), (0,), (0,), (0, 2), (0,)]
    features, label = source[-1]
    assert (features["t"], label) == (b"", 49)
    assert source.where(21) == f"{tmp_path}/c.parquet, record 1"
    assert parquet(tmp_path, columns=["d"])[3] == {"d": b"kind 1"}


def test_types_that_make_no_tensor_and_nulls(tmp_path: Path) -> None:
    more = {"when": pa.array(range(4), pa.timestamp("ns")), "n": pa.array([1, None, 2, 3])}
    path = write(tmp_path / "a.parquet", 0, 4, **more)
    with pytest.raises(
        ConfigError, match=r"'when' has the type timestamp\[ns\], which cannot be a tensor; choose other columns"
    ):
        parquet(path)
    source = parquet(path, columns=["n"])
    assert source[2] == {"n": 2}
    with pytest.raises(RecordError, match=r"example 1 .*record 1\): column 'n' has a null here"):
        source.read(np.array([3, 1, 2]))


def test_files_that_are_not_what_they_were(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.parquet", 0, 20), write(tmp_path / "b.parquet", 20, 40)
    source = parquet(tmp_path)
    size = second.stat().st_size
    first.unlink()
    os.truncate(second, size // 2)
    with pytest.raises(RecordError, match=r"example 3 .*a.parquet, record 3\): the file has vanished"):
        source.read(np.array([3]))
    with pytest.raises(RecordError, match=r"example 25 .*b.parquet, record 5\): the file was truncated"):
        source.read(np.array([25]))
    os.truncate(second, size)  # the end is zeros now
    with pytest.raises(RecordError, match="example 25 "):
        source.read(np.array([25]))
    with pytest.raises(DataError, match=r"b.parquet cannot be read as a Parquet file"):
        parquet(tmp_path)


def test_a_damaged_page(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 0, 5)
    source = parquet(path, columns=["i"])
    content = bytearray(path.read_bytes())
    content[40] ^= 255
    path.write_bytes(content)
    with pytest.raises(RecordError, match="example 2 "):
        source.read(np.array([2]))


def test_other_columns_in_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 5)
    write(tmp_path / "b.parquet", 0, 5, more=pa.array(range(5)))
    with pytest.raises(
        DataError, match=r"b.parquet does not have the same columns as .*a.parquet; they differ in more"
    ):
        parquet(tmp_path)


def test_the_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install 'distlaunch\[parquet\]'"):
        parquet(tmp_path)


def test_threads_share_groups_in_bounded_memory() -> None:
    loads: list[int] = []
    gate = threading.Barrier(4)

    def load(group: int) -> SimpleNamespace:
        loads.append(group)
        return SimpleNamespace(nbytes=10, group=group)

    cache = RowGroupCache(load, most_bytes=35)

    def get(_: int) -> int:
        gate.wait(timeout=60)
        return cache.get(1).group

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(get, range(4))) == [1] * 4
    assert loads == [1], "others wait for the one that reads"
    for group in (2, 3, 1, 4, 1, 2):
        assert cache.get(group).group == group
    assert loads == [1, 2, 3, 4, 2], "the one that was not used for longest makes room"
    child = os.fork()
    if child == 0:  # pytest must not go on in it
        os._exit(0 if cache.get(1).group == 1 and len(loads) == 6 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_no_thread_of_a_forked_process_waits_for_a_thread_that_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited, new_lock = threading.Lock(), threading.Lock
    monkeypatch.setattr(row_groups, "threading", SimpleNamespace(Lock=lambda: inherited))
    cache = RowGroupCache(lambda group: SimpleNamespace(nbytes=1))
    monkeypatch.setattr(row_groups, "threading", SimpleNamespace(Lock=new_lock))
    with inherited:  # as another thread of the parent may hold it
        child = os.fork()
        if child == 0:
            second = threading.Thread(target=cache.get, args=(1,), daemon=True)

            def lock_while_another_thread_gets() -> Any:
                second.start()
                second.join(timeout=5)
                return new_lock()

            monkeypatch.setattr(row_groups, "threading", SimpleNamespace(Lock=lock_while_another_thread_gets))
            cache.get(0)
            os._exit(int(second.is_alive()))
        assert os.waitpid(child, 0)[1] == 0


def test_a_group_that_failed_is_tried_again() -> None:
    fails = [True]

    def load(group: int) -> SimpleNamespace:
        if fails.pop():
            fails.append(False)
            raise OSError("a glitch")
        return SimpleNamespace(nbytes=1)

    cache = RowGroupCache(load)
    with pytest.raises(OSError, match="a glitch"):
        cache.get(0)
    assert cache.get(0).nbytes == 1
