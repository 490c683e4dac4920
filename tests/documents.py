"""Reads the documents: the commands and the files that they show, so that tests run what is written there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PROGRAMS = ("distlaunch ", "pip ", "python ", "python3 ", "pytest", "scripts/", ".ci/", "TF_CONFIG=")
_COMMENT = re.compile(r"\s{2,}#.*")


@dataclass(frozen=True)
class Snippet:
    """A fenced block. `name` is that of its first comment, if it names a file: `# mine.py`."""

    document: str
    language: str
    text: str

    @property
    def name(self) -> str:
        found = re.match(r"# (\S+\.\w+)\n", self.text)
        return found[1] if found else ""

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def snippets() -> list[Snippet]:
    """The fenced blocks of all documents."""
    return [
        Snippet(path.name, language, text)
        for path in DOCUMENTS
        for language, text in _FENCE.findall(path.read_text(encoding="utf-8"))
    ]


def snippet(document: str, start: str) -> str:
    """The text of the one block of a document whose first line begins so."""
    (found,) = [one for one in snippets() if one.document == document and one.first_line.startswith(start)]
    return found.text


def commands() -> set[str]:
    """The commands of all documents, on lines of their own or within a sentence, without their comments."""
    return {command for path in DOCUMENTS for command in _commands(path.read_text(encoding="utf-8"))}


def _commands(text: str) -> set[str]:
    prose = _FENCE.sub("", text)
    lines = [line for line in prose.splitlines() if line.startswith("    ")]
    found = {_COMMENT.sub("", line).strip() for line in lines}
    # a bare name, as in "under `distlaunch run`", says which command is meant, not how it is called
    found |= {" ".join(code.split()) for code in _INLINE.findall(prose) if len(code.split()) > 2 or "pytest" in code}
    return {command for command in found if command.startswith(_PROGRAMS)}
