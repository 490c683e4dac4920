"""Output for CI systems: annotations of GitHub Actions, and JUnit reports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from distlaunch.base.errors import Problem, UsageError
from distlaunch.base.secret_mask import SecretMask
from distlaunch.base.visible import visible
from distlaunch.supervise.diagnose.exit_reason import Failure


@dataclass(frozen=True)
class Case:
    """The result for one config.

    Attributes:
        failure: a description of the failure, with the most important line first; empty on success.
        place: file and line of the user's code that failed; None if unknown.
    """

    config: str
    seconds: float
    failure: str = ""
    place: tuple[str, int] | None = None


def write_junit(path: str, suite: str, cases: Sequence[Case]) -> None:
    """Write a JUnit report and create its folder. Raise UsageError if it cannot be written.

    Args:
        suite: the name of the command.
    """
    failed = [case for case in cases if case.failure]
    numbers = {"tests": str(len(cases)), "failures": str(len(failed)), "errors": "0", "skipped": "0"}
    seconds = f"{sum(case.seconds for case in cases):.3f}"
    from xml.etree import ElementTree  # imported here, since other commands do not need it

    root = ElementTree.Element("testsuites")
    top = ElementTree.SubElement(root, "testsuite", {"name": f"distlaunch {suite}", **numbers, "time": seconds})
    for case in cases:
        attributes = {"classname": suite, "name": visible(case.config), "time": f"{case.seconds:.3f}"}
        if case.place is not None:
            attributes |= {"file": visible(os.path.relpath(case.place[0])), "line": str(case.place[1])}
        element = ElementTree.SubElement(top, "testcase", attributes)
        if case.failure:
            text = visible(SecretMask(os.environ).whole(case.failure))
            first = text.splitlines()[0]
            ElementTree.SubElement(element, "failure", {"message": first}).text = text
    ElementTree.indent(root)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise UsageError(f"--junit-xml {path}: cannot be written: {error.strerror}") from None


def failure_text(line: str, failure: Failure) -> str:
    """Return the text of a failure: a line with the place in the user's code, and the traceback below."""
    if failure.place is not None:
        line += f" ({os.path.relpath(failure.place[0])}:{failure.place[1]})"
    hint = [f"hint: {failure.hint}"] if failure.hint else []
    return "\n".join([line, *(f"  {each}" for each in failure.detail), *hint])


def annotate_failure(line: str, failure: Failure) -> None:
    """Annotate the line in the user's code at which a failure occurred; see `annotate`."""
    place = failure.place
    annotate([Problem((), line, f"{place[0]}:{place[1]}" if place is not None else None)])


def annotate(
    problems: Sequence[Problem],
    environ: Mapping[str, str] = os.environ,
    level: Literal["error", "warning"] = "error",
) -> None:
    """Print an annotation for each problem if this is a job of GitHub Actions."""
    if environ.get("GITHUB_ACTIONS") != "true":
        return
    for problem in problems:
        file, _, line = (problem.source or "").rpartition(":")
        if not line.isdigit() or file.startswith("--set"):
            file, line = problem.source or "", ""
        where = {} if file.startswith("--") or not file else {"file": os.path.relpath(file)}
        where |= {"line": line} if where and line else {}
        text = SecretMask(environ).whole(": ".join(part for part in (problem.dotted, problem.message) if part))
        properties = ",".join(f"{name}={_escape(value, ',:')}" for name, value in where.items())
        # use standard error, since programs read the standard output of commands
        click.echo(f"::{level}{' ' if properties else ''}{properties}::{_escape(text)}", err=True)


def _escape(text: str, also: str = "") -> str:
    return "".join(f"%{ord(letter):02X}" if letter in f"%\r\n{also}" else letter for letter in text)
