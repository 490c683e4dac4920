"""Lines, CSV and JSON lines by offset: beside what Python's own readers make of whole files."""

from __future__ import annotations

import csv as csv_module
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.base.errors import ConfigError, DataError
from distlaunch.data import RecordError, csv, json_lines, text_lines
from distlaunch.data.files.tables import rows

pytestmark = pytest.mark.usefixtures("virtual_devices", "index_cache")

CELL = st.text(st.sampled_from('a,"\n\r 1\u00e9\u2028\U0001f600;'), max_size=6)


def read_all(source: Any) -> list[Any]:
    return [source[index] for index in range(len(source))]


LINE = st.text(st.sampled_from("ab\r\u2028\u00e9 "), max_size=5)


@settings(max_examples=30)
@given(st.lists(LINE, max_size=8), st.booleans(), st.integers(1, 9))
def test_lines_end_with_lf_or_crlf(lines: list[str], ends: bool, at_once: int) -> None:
    lines = lines if ends else [*lines, "end"]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "AT_ONCE_BYTES", at_once)
        Path(folder, "a.txt").write_bytes("".join(f"{line}\n" for line in lines).encode()[: None if ends else -1])
        Path(folder, "b.txt").write_bytes(b"last")
        found = [line.decode() for line in read_all(text_lines(folder))]
        assert found == [*(line.removesuffix("\r") for line in lines), "last"]


def test_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfgood\r\nbad")
    assert read_all(text_lines(tmp_path)) == [b"good", b"bad"]
    (tmp_path / "a.txt").write_text("good", encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16; convert it to UTF-8"):
        text_lines(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(ConfigError, match="1 files without a record"):
        text_lines(tmp_path)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=8), st.sampled_from(["\n", "\r\n"]), st.integers(1, 40)
)
def test_csv_is_read_back_as_it_was_written(table: list[tuple[str, ...]], end: str, at_once: int) -> None:
    text = io.StringIO(newline="")
    writer = csv_module.writer(text, lineterminator=end, quoting=csv_module.QUOTE_ALL)
    writer.writerows([("x", "y\nz", "ü"), *table])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "AT_ONCE_BYTES", at_once)
        Path(folder, "a.csv").write_bytes((text.getvalue() + 'a,a,"last"').encode())  # a string in each column
        Path(folder, "b.csv").write_bytes(b"")
        source = csv(folder)
        assert [tuple(part.decode() for part in row.values()) for row in read_all(source)] == [
            *table,
            ("a", "a", "last"),
        ]
        assert list(source[0]) == ["x", "y\nz", "ü"]


NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(max_examples=30)
@given(st.lists(st.tuples(NUMBER, st.floats(width=32), NUMBER | st.none()), min_size=1, max_size=5))
def test_csv_numbers(table: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = [",".join("" if value is None else repr(value) for value in row) for row in table]
        Path(folder, "a.csv").write_text("\n".join(["i,f,n", *lines, "7,nan,"]))
        source = csv(folder)
        assert [spec.dtype for spec in source.raw_spec] == [tf.int64, tf.float32, tf.float32]
        found = source.read(np.arange(len(table)))
    assert found[0].tolist() == [row[0] for row in table]
    np.testing.assert_array_equal(found[1], np.array([row[1] for row in table], np.float32))
    np.testing.assert_array_equal(found[2], np.array([np.nan if v is None else v for _, _, v in table], np.float32))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (["1", "-2"], "int64"),
        (["1", "2.5"], "float32"),
        (["1", ""], "float32"),
        (["", ""], "float32"),
        (["1", "inf"], "float32"),
        (["1", "NA"], "string"),
        (["1_000", "1"], "string"),
        (["٣", "1"], "string"),
        (["9223372036854775808", "1"], "string"),
        (["0x10", "1"], "string"),
        (["true", "false"], "string"),
    ],
)
def test_types_of_csv_columns_are_those_of_all_files(tmp_path: Path, values: list[str], dtype: str) -> None:
    for number, value in enumerate(values):
        (tmp_path / f"{number}.csv").write_text(f"a,b\n1,{value}\n")
    source = csv(tmp_path, columns=["b"])
    assert [spec.dtype.name for spec in source.raw_spec] == [dtype]
    read_all(source)


def test_a_label_and_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,c\n1,2,3\n\n4,5,6\n\n")
    assert read_all(csv(tmp_path, label="b")) == [({"a": 1, "c": 3}, 2), ({"a": 4, "c": 6}, 5)]
    source = csv(tmp_path, columns=["c", "a"], label="a")
    assert source[1] == ({"c": 6}, 4)
    assert source.where(1) == f"{tmp_path}/a.csv, record 1 at byte 13"
    for wrong, message in (
        ({"label": "d"}, "label: got 'd'; expected one of a, b, c"),
        ({"columns": "a"}, r"got the text 'a'; expected a list of names: \['a'\]"),
        ({"columns": ["a", "a"]}, "more than once"),
        ({"columns": ["a"], "label": "a"}, "there is no column besides the label"),
    ):
        with pytest.raises(ConfigError, match=message):
            csv(tmp_path, **wrong)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n3\n", "at byte 8: the row has 1 columns, but the header has 2"),
        (b'a,b\n1,2\n3,"x\n4,5\n', "at byte 8: a quote in this row is never closed"),
        (b'a,b\n1,5"\n2,6"\n', "at byte 4: the row is not CSV: a field that contains a quote must be quoted"),
        (b'a,b\n1,2\n"x"y,3\n', "at byte 8: the row is not CSV: ',' expected after"),
        (b"a,a\n1,2\n", "names a column more than once: a"),
        (b"a\xff,b\n1,2\n", "the names of the columns are not UTF-8"),
        (b"a,b\r1,2\r", "not CSV"),
    ],
)
def test_what_is_no_csv(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        csv(tmp_path)


def test_other_columns_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("b,a\n1,2\n")
    with pytest.raises(DataError, match=r"b.csv has the columns b, a; expected those of .*a.csv: a, b"):
        csv(tmp_path)


def test_a_row_that_is_not_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n22\n")
    source = csv(path)
    path.write_text("a\n1\nxx\n")
    assert source[0] == {"a": 1}
    with pytest.raises(RecordError, match=r"example 1 cannot be read .*record 1 at byte 4\): the row has changed"):
        source.read(np.array([0, 1]))


def test_a_row_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "AT_ONCE_BYTES", 10)
    monkeypatch.setattr(rows, "LONGEST_ROW_BYTES", 50)
    (tmp_path / "a.csv").write_text('a\n1\n"' + "2\n" * 100)
    with pytest.raises(DataError, match=r"at byte 4: the row is longer than .*is a quote in it never closed"):
        csv(tmp_path)


def test_fields_beyond_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n" + "x" * 200_000)
    assert len(csv(tmp_path)[0]["a"]) == 200_000


SCALARS = st.fixed_dictionaries(
    {
        "i": NUMBER,
        "f": st.floats(width=32),
        "b": st.booleans(),
        "t": st.text(max_size=5),
        "v": st.tuples(NUMBER, NUMBER),
    }
)


@settings(max_examples=30)
@given(st.lists(SCALARS, min_size=1, max_size=6), st.booleans(), st.integers(1, 60))
def test_json_is_read_back_as_it_was_written(records: list[dict[str, Any]], ascii_only: bool, at_once: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "AT_ONCE_BYTES", at_once)
        text = "\n \n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
        Path(folder, "a.jsonl").write_text(text, encoding="utf-8")
        Path(folder, "b.jsonl").write_text("\n")
        source = json_lines(folder)
        dtypes = dict(zip(records[0], (spec.dtype.name for spec in source.raw_spec), strict=True))
        assert dtypes == {"i": "int64", "f": "float32", "b": "bool", "t": "string", "v": "int64"}
        for found, record in zip(read_all(source), records, strict=True):
            assert found["t"].decode() == record["t"]
            assert (found["i"], found["b"], tuple(found["v"])) == (record["i"], record["b"], record["v"])
            np.testing.assert_array_equal(found["f"], np.float32(record["f"]))


def test_json_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1, "t": null, "v": [1, 2], "s": ["a", "b"]}\n{"late": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 3, "t": "x", "v": [null, 2], "s": ["c", "d"], "late": 1.5}')
    first, second, third = read_all(json_lines(tmp_path))
    assert (first["n"], first["t"], first["v"].tolist(), first["s"].tolist()) == (1, b"", [1, 2], [b"a", b"b"])
    assert math.isnan(first["late"])
    assert math.isnan(second["n"])
    assert np.isnan(second["v"]).all()
    assert second["s"].tolist() == [b"", b""]
    assert third["late"] == 1.5
    features, label = json_lines(tmp_path, fields=["t"], label="late")[1]
    assert (features, label) == ({"t": b""}, 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"a": {"b": 1}}'], "'a' has objects"),
        (['{"a": [1]}', '{"a": [1, 2]}'], "'a' has lists of different lengths"),
        (['{"a": []}'], "'a' has only empty lists"),
        (['{"a": 1}', '{"a": "x"}'], "'a' has values of different types"),
        (['{"a": true}', "{}"], "'a' has true and false, and is missing in some records"),
        (['{"a": 9223372036854775808}'], "'a' has numbers of more than 64 bits"),
    ],
)
def test_fields_that_make_no_tensor_may_be_left_out(tmp_path: Path, lines: list[str], message: str) -> None:
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.jsonl").write_text(line[:-1] + (', "ok": 1}' if len(line) > 2 else '"ok": 1}'))
    with pytest.raises(ConfigError, match=message):
        json_lines(tmp_path)
    assert read_all(json_lines(tmp_path, fields=["ok"])) == [{"ok": 1}] * len(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "at byte 9: the line cannot be read: it is not JSON"),
        (b'{"a": 1}\n"good"\n', "at byte 9: the line cannot be read: it is str; expected an object"),
        (b'{"a": "\xff"}\n', "it is not UTF-8"),
        (b'{"a": ' + b"[" * 100_000 + b"\n", "nested too deeply|not JSON"),
    ],
)
def test_what_is_no_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        json_lines(tmp_path)


def test_a_record_that_is_not_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}')
    source = json_lines(path)
    path.write_text('{"a": 1}\n{"a"= 2}\n{"a":""}')
    with pytest.raises(RecordError, match=r"example 1 .*record 1 at byte 9.*not JSON"):
        source.read(np.array([0, 1]))
    with pytest.raises(RecordError, match=r"example 2 .*record 2 at byte 18.*has changed"):
        source.read(np.array([0, 2]))


def test_no_rows_are_arrays_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"v": [1, 2], "t": ["x"]}')
    (tmp_path / "a.csv").write_text("a,b\n1,x\n")
    (tmp_path / "a.txt").write_text("a")
    none = np.array([], np.int64)
    assert [part.shape for part in json_lines(tmp_path).read(none)] == [(0, 2), (0, 1)]
    assert [(part.shape, part.dtype) for part in csv(tmp_path).read(none)] == [((0,), np.int64), ((0,), object)]
    assert [part.shape for part in text_lines(tmp_path).read(none)] == [(0,)]
