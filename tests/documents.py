"""Reads the documents: the commands, files, links and names of code that they show, so that tests can check them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PROGRAMS = ("distlaunch ", "pip ", "python ", "python3 ", "pytest", "scripts/", ".ci/", "TF_CONFIG=")
_COMMENT = re.compile(r"\s{2,}#.*")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?P<file>[\w/]+\.py)(?:: (?P<name>[\w.]+)(?:\(\))?)?")


@dataclass(frozen=True)
class Snippet:
    """A fenced block."""

    document: str
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


@dataclass(frozen=True)
class CodeName:
    """A file of the package that a document names, perhaps with a name in the file: `supervise/policy.py: decide()`."""

    document: str
    file: str
    name: str = ""


def snippets() -> list[Snippet]:
    """The fenced blocks of all documents."""
    return [
        Snippet(path.name, language, text)
        for path in DOCUMENTS
        for language, text in _FENCE.findall(path.read_text(encoding="utf-8"))
    ]


def snippet(document: str, start: str) -> str:
    """Return the text of the only block of a document whose first line begins with this text."""
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
    found |= {" ".join(code.split()) for code in _inline(text) if len(code.split()) > 2 or "pytest" in code}
    return {command for command in found if command.startswith(_PROGRAMS)}


def _inline(text: str) -> list[str]:
    return _INLINE.findall(_FENCE.sub("", text))


def links() -> set[tuple[Path, str]]:
    """The links of all documents and of the changelog within this repository, each with the file that it is in."""
    found = set()
    for path in (*DOCUMENTS, ROOT / "CHANGELOG.md"):
        targets = _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))
        found |= {(path, target) for target in targets if "://" not in target}
    return found


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, by GitHub's rules."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_names(document: str) -> set[CodeName]:
    """Return the files of the package that a document names, by paths below `distlaunch/`, and names in these files."""
    (path,) = [path for path in DOCUMENTS if path.name == document]
    text = re.sub(r"\[`[^`]+`\]", "", path.read_text(encoding="utf-8"))  # links are looked up as links
    matches = [_CODE.fullmatch(" ".join(code.split())) for code in _inline(text)]
    return {CodeName(document, match["file"], match["name"] or "") for match in matches if match}


def named_tests(document: str) -> list[tuple[str, str]]:
    """The tests that a document names by links to their files, each with its file."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return [(file, name) for name, file in re.findall(r"\[`(test_\w+)`\]\(\.\./([\w/]+\.py)\)", text)]
