"""References that the check accepts because only running the module could show whether they exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlaunch.config.references.modules import ModuleMissingError, find_source
from distlaunch.config.references.signatures import Function, argument_problems
from distlaunch.config.references.source_names import SourceError, read_module

SOURCE = """\
import os.path as paths
from json import loads
if paths:
    def chosen(): ...
else:
    def chosen(x): ...
try:
    import nothing
except ImportError:
    nothing = None
for item in ():
    pass
with open(__file__) as handle:
    a, (b, *c) = 1, (2, 3)
typed: int
typed_value: int = 3
class Model: ...
def outer():
    inner = 1
"""


def test_bound_names(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    names = read_module(file)
    expected = {"paths", "loads", "chosen", "nothing", "item", "handle", "a", "b", "c", "typed_value", "Model", "outer"}
    assert expected <= names.bound.keys()
    assert not {"inner", "typed"} & names.bound.keys()
    assert not names.is_open


@pytest.mark.parametrize("line", ["from x import *", "globals()['a'] = 1", "def __getattr__(name): ..."])
def test_modules_that_may_hold_more(line: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(line + "\n")
    assert read_module(file).is_open


def test_a_file_that_is_too_large_to_parse_may_hold_anything(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("# one of many lines\n" * 500_000 + "def f(): ...\n")
    assert read_module(file).is_open
    file.write_text("table = '" + "x" * (9 << 20) + "'\n")
    assert read_module(file).is_open


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x = '\0'", b"(" * 5000, b"def f(:\n", b"-" * 200_000 + b"1"])
def test_files_that_are_no_python(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_bytes(content)
    with pytest.raises(SourceError, match="cannot read the file"):
        read_module(file)


def test_modules_are_found_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine"
    (package / "space").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('was run')\n")
    (package / "space" / "models.py").write_text("def net(): ...\n")
    monkeypatch.chdir(tmp_path)
    assert find_source("mine.space.models") == package / "space" / "models.py"
    assert find_source("math") is None
    with pytest.raises(ModuleMissingError, match="did you mean 'models'"):
        find_source("mine.space.model")
    with pytest.raises(ModuleMissingError, match="did you mean 'mine'"):
        find_source("mien.space")


@pytest.mark.parametrize(
    ("signature", "given", "wrong"),
    [
        ("a, b=1, *, c, d=2", ["a", "c"], []),
        ("a, b=1, *, c, d=2", ["a"], [""]),
        ("a", ["a", "z"], ["z"]),
        ("**kwargs", ["z"], []),
        ("a, **kwargs", ["z"], [""]),
        ("a, /", ["a"], ["a"]),
        ("*args", [], []),
    ],
)
def test_arguments(signature: str, given: list[str], wrong: list[str], tmp_path: Path) -> None:
    import ast

    node = ast.parse(f"def f({signature}): ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert [name for name, _ in argument_problems(Function("f", node), given, complete=True)] == wrong
