"""States as bytes: the identity there and back, whatever types, shapes and names; nothing runs code."""

from __future__ import annotations

import ast
import hashlib
import io
import pickle
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import distlaunch
from distlaunch.checkpoints.format import read_header
from distlaunch.checkpoints.state_files import FileDamagedError, StateFile, read_files, write_file

FOREIGN = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4"]
PLAIN = ["bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32"]
PLAIN += ["float64", "complex64", ">f4", "<U3", "S2"]
ALLOWED = {
    *("training/export/check.py", "training/export/on_tensorflow.py", "serving/clean_check.py"),
    *("data/examples/reader_pool.py", "data/examples/reader_messages.py", "tasks/readers.py"),
}
"""They hand something to a process that they start, in a file or through a pair of sockets, or read it there."""


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if draw(st.booleans()):
        dtype = np.dtype(getattr(ml_dtypes, draw(st.sampled_from(FOREIGN))))
        return draw(hnp.arrays(f"u{dtype.itemsize}", shape)).astype("float32").astype(dtype)
    array = draw(hnp.arrays(draw(st.sampled_from(PLAIN)), shape))  # NaN and infinities among them
    return array.T if draw(st.booleans()) else array


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def written(folder: Path, state: dict[str, np.ndarray]) -> StateFile:
    (folder / "one").unlink(missing_ok=True)
    return write_file(folder, "one", state, {})


@settings(deadline=None)
# each name of a state has a prefix, as in `model/...`; the format keeps one name for itself
@given(st.dictionaries(st.text(st.characters(codec=None)).map("model/{}".format), arrays(), max_size=4))
def test_identity(folder: Path, state: dict[str, np.ndarray]) -> None:
    file = written(folder, state)
    assert file.digests == hashlib.sha256((folder / "one").read_bytes()).hexdigest(), "one piece"
    back = read_files(folder, [file])
    assert list(back) == list(state)
    for name, value in state.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert back[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("name", ["index", "0", "a/b:0", "../x", "file", "", "\0", "\udcff", "über"])
def test_any_name(folder: Path, name: str) -> None:
    assert read_files(folder, [written(folder, {name: np.array(np.nan)})]).keys() == {name}


def test_objects_are_refused_before_they_are_written(folder: Path) -> None:
    with pytest.raises(TypeError, match="callback/0/seen: got an array of the type object"):
        written(folder, {"callback/0/seen": np.array([{}, None])})


@pytest.mark.parametrize("wrap", ["pickle", "npy", "npz"])
def test_a_pickle_from_elsewhere_is_not_run(wrap: str, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    file = io.BytesIO()
    if wrap == "pickle":
        pickle.dump(Evil(), file)
    elif wrap == "npy":
        np.save(file, np.array([Evil()]), allow_pickle=True)
    else:
        np.savez(file, index=np.array([Evil()], object))
    data = file.getvalue()
    (tmp_path / "one").write_bytes(data)
    with pytest.raises(ValueError, match="header"):
        read_files(tmp_path, [StateFile("one", len(data), hashlib.sha256(data).hexdigest())])
    assert not (tmp_path / "ran").exists()


@settings(deadline=None)
@given(st.data())
def test_what_is_damaged_is_known(folder: Path, data: st.DataObject) -> None:
    """Whichever byte is changed or missing, the error is that of damage and no other."""
    file = written(folder, {"a": np.arange(5.0), "b": np.array(["x", "yz"]), "c": np.zeros((0, 2), np.int8)})
    whole = (folder / "one").read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    (folder / "one").write_bytes(damaged)
    with pytest.raises(FileDamagedError):
        read_files(folder, [file])
    (folder / "one").write_bytes(damaged)
    with pytest.raises(FileDamagedError):  # whatever size it is said to have
        read_files(folder, [replace(file, num_bytes=len(damaged))])


def test_only_what_talks_to_its_own_children_imports_pickle() -> None:
    root = Path(distlaunch.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if _unpickles(path)}
    assert found == ALLOWED


def _unpickles(path: Path) -> bool:
    """Return whether a module imports something that can execute what it reads, or lets NumPy unpickle."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not _is_false(node.value):
            return True
    return bool(names & {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_damaged_header_is_called_so(at: int) -> None:
    """The messages of Python's parsers (`can't decode byte 0xd0`) do not help users."""
    text = bytearray(b'{"__metadata__": {"types": "{}"}, "a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}')
    text[at] = 0xD0
    with pytest.raises(ValueError, match=r"its header is damaged$"):
        read_header(bytes(text))
    with pytest.raises(ValueError, match=r"its header is damaged$"):
        read_header(b'{"__metadata__": {"types": "{"}}')
