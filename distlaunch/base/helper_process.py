"""Runs a helper process, which gets its request in argv and writes its answer as JSON to a file.

Helper processes import a framework in place of the caller, which waits for them. All failures are reported alike.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch.base.plain_types import is_dict
from distlaunch.base.secret_mask import SecretMask

ANSWER = "{answer}"
"""Placeholder in argv for the file to which the process writes its answer."""


@dataclass(frozen=True)
class Answer:
    """The result of a helper process.

    Attributes:
        code: the exit code; -N for signal N.
        value: the answer, with masked secrets in `message` and `problems`; None if there is no answer.
        output: the lines that the process printed, except empty lines, with masked secrets.
    """

    code: int
    value: Any
    output: tuple[str, ...]

    @property
    def how_it_ended(self) -> str:
        """Return how the process ended, as words that follow its name in messages: `ended with exit code 1`."""
        return (
            f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"
        )

    def last_lines(self, number: int, indent: str = "") -> str:
        """Return the last lines of its output, or an empty string."""
        return "".join(f"\n{indent}{line}" for line in self.output[-number:])


def run_helper(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    timeout_s: float | None = None,
    shows_output: bool = False,
) -> Answer:
    """Run a process to its end, and return its answer.

    Args:
        argv: the command, with `ANSWER` in place of the path of the answer.
        shows_output: whether the process inherits standard output.

    Raises:
        TimeoutError: the process has not ended in time.
    """
    # the answer is in a file, since libraries may print to standard output
    with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
        answer_file, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [str(answer_file) if word == ANSWER else word for word in argv]
        # output goes to a file, since a pipe without a reader would block the process
        with log.open("wb") as file:
            output = None if shows_output else file
            try:
                done = subprocess.run(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=file, timeout=timeout_s
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
        mask = SecretMask(env)
        said = mask.whole(log.read_text(encoding="locale", errors="replace"))
        output = tuple(line for line in said.splitlines() if line.strip())
        try:
            answer = json.loads(answer_file.read_text(encoding="utf-8"))
        # the process has ended without an answer
        except (OSError, ValueError):
            answer = None
    if is_dict(answer):
        # mask texts for users; the other fields are names and numbers
        answer |= {name: mask.inside(answer[name]) for name in ("message", "problems") if name in answer}
    return Answer(done.returncode, answer, output)
