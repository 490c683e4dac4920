"""Tests of the files that `distlaunch predict --input FILE` reads, and of the messages about files that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.base.errors import UsageError
from distlaunch.serving.exported_model import ANY, Spec
from distlaunch.serving.input_files import read_inputs

X = (Spec("x", "float32", (None, 3)),)
IMAGE = (Spec("image", "uint8", (None, 2, 2)),)
TEXT = (Spec("text", "string", (None,)),)
USER, ITEM = (Spec("user", "uint64", (None,)),), (Spec("item", "int64", (None, 2)),)
PAIR = (Spec("user", "int32", (None,)), Spec("item", "float32", (None, 2)))


def write(path: Path, content: Any) -> Path:
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        np.save(path, content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "inputs", "expected"),
    [
        ("a.npy", np.arange(6.0).reshape(2, 3), X, {"x": [[0, 1, 2], [3, 4, 5]]}),
        ("a.npz", {"any": np.ones((1, 3))}, X, {"x": [[1, 1, 1]]}),
        ("a.npz", {"user": np.array([7]), "item": np.ones((1, 2)), "label": np.zeros(1)}, PAIR,
         {"user": [7], "item": [[1, 1]]}),
        ("a.csv", "a,b,c\n1,2,3e0\n4,5,6\n", X, {"x": [[1, 2, 3], [4, 5, 6]]}),
        ("a.csv", "label,x_2,x_1,x_0\n9,3,2,1\n", X, {"x": [[1, 2, 3]]}),
        ("a.csv", "a,b,c,d\r\n1,2,3,4\r\n", IMAGE, {"image": [[[1, 2], [3, 4]]]}),
        ("a.csv", "item_1,user,item_0\n0.5,3,1\n", PAIR, {"user": [3], "item": [[1, 0.5]]}),
        ("a.csv", 'review\n"two\nlines, and ""quotes"""\n', TEXT, {"text": [b'two\nlines, and "quotes"']}),
        ("a.tsv", 'id\ttext\n1\tan "odd one\n', TEXT, {"text": [b'an "odd one']}),
        ("a.txt", "\ufeffgood\n\na\u2028b\r\n", TEXT, {"text": [b"good", b"", "a\u2028b".encode()]}),
        ("a.txt", "no line end", (Spec("text", "string", (None, 1)),), {"text": [[b"no line end"]]}),
        ("a.jsonl", '{"user": 1, "item": [1, 2]}\n{"item": [3, 4], "user": 2}\n', PAIR,
         {"user": [1, 2], "item": [[1, 2], [3, 4]]}),
        ("a.jsonl", '"good"\n"bad"\n', TEXT, {"text": [b"good", b"bad"]}),
        ("a.csv", f"user\n{2**64 - 1}\n7.0\n{2**63 + 1}\n", USER, {"user": [2**64 - 1, 7, 2**63 + 1]}),
        ("a.csv", f"a,b\n{2**53 + 1},{-(2**63)}\n5.0,1e3\n", ITEM, {"item": [[2**53 + 1, -(2**63)], [5, 1000]]}),
        ("a.jsonl", f"{2**64 - 1}\n7.0\n", USER, {"user": [2**64 - 1, 7]}),
        ("a.jsonl", f"[{2**53 + 1}, 1.0]\n[2, 3]\n", ITEM, {"item": [[2**53 + 1, 1], [2, 3]]}),
        ("a.npy", np.array([2**64 - 1], np.uint64), USER, {"user": [2**64 - 1]}),
        ("a.npy", np.array(["good", "bad"]), TEXT, {"text": [b"good", b"bad"]}),
        ("a.npy", np.array([1, 2], np.int64), (Spec("inputs", ANY, (None, 1)),), {"inputs": [[1], [2]]}),
    ],
)  # fmt: skip
def test_what_is_read(tmp_path: Path, name: str, content: Any, inputs: Any, expected: dict[str, Any]) -> None:
    found = read_inputs(write(tmp_path / name, content), inputs)
    assert {key: value.tolist() for key, value in found.items()} == expected
    assert all(found[spec.name].dtype == spec.dtype for spec in inputs if spec.dtype not in ("string", ANY))


@pytest.mark.parametrize(
    ("name", "content", "inputs", "message"),
    [
        ("a.npy", np.zeros((2, 4)), X, "a.npy: x: got float64[2,4]; the model takes x: float32[?,3]"),
        ("a.npy", np.zeros((0, 3)), X, "it contains no rows"),
        ("a.npy", np.float32(1), X, "a single value; expected rows"),
        ("a.npy", np.array([[1, 2, 3.5, 300]]).reshape(1, 2, 2), IMAGE,
         "image: row 0, at [1, 0]: got 3.5; expected whole numbers from 0 to 255 (uint8)"),
        ("a.npy", np.array(["a"]), X, "x: got string[1]; the model takes x: float32[?,3]"),
        ("a.npy", np.zeros((2, 3)), TEXT, "text: got float64[2,3]; the model takes text: string[?]"),
        ("a.npy", np.zeros((2, 3)), PAIR, "use an .npz file with an array for each"),
        ("a.npy", b"\x93NUMPY\x01\x00v\x00", X, "it is damaged"),
        ("a.npy", b"no array", X, "or is not a NumPy file"),
        ("a.npz", {"usr": np.zeros(1), "item": np.zeros((1, 2))}, PAIR,
         "no array 'user'; it contains 'usr', 'item'; the model takes user: int32[?], item: float32[?,2]"),
        ("a.npz", {"user": np.zeros(2), "item": np.zeros((3, 2))}, PAIR, "rows: user has 2, item has 3"),
        ("a.npz", b"PK\x03\x04 but no more", X, "it is damaged"),
        ("a.csv", "a,b\n1,2\n", X, "1: got the columns 'a', 'b'; expected 'x_0 to x_2', or 3 columns of any name"),
        ("a.csv", "a,b,c\n1,2,3\n1,two,3\n", X, "a.csv:3: column 'b': got 'two'; expected a number"),
        ("a.csv", "a,b,c\n1,,3\n", X, "a.csv:2: column 'b': got ''; expected a number"),
        ("a.csv", "a,b,c\n1,2,3,4\n", X, "a.csv:2: got 4 values; expected 3"),
        ("a.csv", "1,2,3\n4,5,6\n", X, "a.csv:1: got '1', '2', '3'; expected the names of the columns"),
        ("a.csv", "a,b,a\n4,5,6\n", X, "several columns are named 'a'"),
        ("a.csv", "user,item_0\n1,2\n", PAIR, "expected 'item_0 to item_1'; the model takes user"),
        ("a.csv", "user,item_0,item_1\n1,2,3\n0.5,2,3\n", PAIR,
         "a.csv:3: column 'user': got '0.5'; expected whole numbers from -2147483648 to 2147483647 (int32)"),
        ("a.csv", "user\n-1\n", USER, "got '-1'; expected whole numbers from 0 to 18446744073709551615 (uint64)"),
        ("a.csv", f"user\n{2**64}\n", USER, "a.csv:2: column 'user': got '18446744073709551616'; expected whole"),
        ("a.csv", "user\n9007199254740993.0\n", USER, "(uint64); floats from 2**53 on are not exact, so give integers"),
        ("a.jsonl", f"[{2**53 + 1}, 1.5]\n", ITEM, "a.jsonl:1: item: got 1.5; expected whole numbers"),
        ("a.npy", np.array([1.0, 2.0**64]), USER, "row 1: got 1.8446744073709552e+19; expected whole numbers from 0"),
        ("a.csv", "", X, "it is empty; expected a line of column names"),
        ("a.csv", "a,b,c\n", X, "it contains no rows"),
        ("a.csv", 'a,b,c\n1,2,"3\n', X, "a.csv:2: it is not CSV"),
        ("a.txt", "text\n", X, "a .txt file has one text per line; the model takes x: float32[?,3]"),
        ("a.txt", b"good\nb\xe4d\n", TEXT, "a.txt:2: it is not UTF-8"),
        ("a.jsonl", '{"user": 1}\n', PAIR, "a.jsonl:1: no 'item'; it has 'user'"),
        ("a.jsonl", "[1, 2, 3]\n[1, 2]\n", X, "a.jsonl:2: x: got [1, 2] [2], unlike in the lines before"),
        ("a.jsonl", "[1, 2, 3]\nnope\n", X, "a.jsonl:2: it is not JSON"),
        ("a.jsonl", "[[1], [2, 3]]\n", X, "a.jsonl:1: x: rows of different lengths"),
        ("a.xlsx", "", X, "got '.xlsx'; expected a file that ends in .npy"),
    ],
)  # fmt: skip
def test_what_does_not_fit(tmp_path: Path, name: str, content: Any, inputs: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_inputs(write(tmp_path / name, content), inputs)
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.npy: cannot be read: No such file"):
        read_inputs(tmp_path / "none.npy", X)
