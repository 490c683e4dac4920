"""Every text file and pipe is opened with a named encoding; the default depends on the locale."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distlaunch

PACKAGE = Path(distlaunch.__file__).parent
TEXT_METHODS = ("read_text", "write_text")
PROCESSES = ("run", "Popen", "check_output")


def unnamed(code: str) -> Iterator[int]:
    """Line numbers of calls that use the encoding of the locale by default."""
    if not any(word in code for word in (*TEXT_METHODS, "open(", "text=")):
        return  # parsing all files takes seconds
    for call in ast.walk(ast.parse(code)):
        if isinstance(call, ast.Call) and is_text(call) and not any(word.arg == "encoding" for word in call.keywords):
            yield call.lineno


def is_text(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(attr=name) if name in TEXT_METHODS:
            return True
        case ast.Attribute(value=ast.Name(id="subprocess"), attr=name) if name in PROCESSES:
            return any(word.arg in ("text", "universal_newlines") for word in call.keywords)
        case ast.Name(id="open") | ast.Attribute(value=ast.Name(id="os"), attr="fdopen"):
            modes = call.args[1:2]
        case ast.Attribute(attr="open") if call.args:  # the method of a path; those of other classes take no mode
            modes = call.args[:1]
        case _:
            return False
    match modes:
        case [ast.Constant(value=str(mode))]:
            return "b" not in mode and set(mode) <= set("rwax+t")
        case _:
            return not modes


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text(encoding='utf-8')", False),
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("path.open('w')", True),
        ("path.open('wb')", False),
        ("os.fdopen(fd, 'w')", True),
        ("subprocess.run(words, text=True)", True),
        ("pool.open()", False),
    ],
)
def test_what_is_found(code: str, is_found: bool) -> None:
    assert list(unnamed(code)) == [1] * is_found


def test_the_package_names_all_encodings() -> None:
    files = PACKAGE.rglob("*.py")
    lines = {path: list(unnamed(path.read_text(encoding="utf-8"))) for path in files}
    assert not {str(path.relative_to(PACKAGE)): found for path, found in lines.items() if found}
