"""Runs a helper process: it gets its request in argv, and answers with JSON in a file.

Such a process imports a framework, or deliberately does not; the caller waits, and all failures are reported alike.
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
"""Stands in argv for the file that the process writes its answer to."""


@dataclass(frozen=True)
class Answer:
    """The result of a helper process.

    Attributes:
        code: the exit code; -N for signal N.
        value: the answer; None if there is none. What is in `message` and `problems` is without secrets, too.
        output: the lines that the process printed, without empty ones and without secrets of its variables.
    """

    code: int
    value: Any
    output: tuple[str, ...]

    @property
    def how_it_ended(self) -> str:
        """Describe the end of a process; the text follows its name."""
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
        argv: the command, with `ANSWER` where the path of the answer belongs.
        shows_output: whether its standard output goes to that of this process.

    Raises:
        TimeoutError: it has not ended in time.
    """
    # the answer is a file: libraries print what they like to standard output
    with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
        answer_file, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [str(answer_file) if word == ANSWER else word for word in argv]
        # output goes to a file: a pipe that nobody reads would hold the process up
        with log.open("wb") as file:
            output = None if shows_output else file
            try:
                done = subprocess.run(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=file, timeout=timeout_s
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
        mask = SecretMask(env)
        said = mask.whole(log.read_text(errors="replace"))
        output = tuple(line for line in said.splitlines() if line.strip())
        try:
            answer = json.loads(answer_file.read_text(encoding="utf-8"))
        # it has ended before it answered
        except (OSError, ValueError):
            answer = None
    if is_dict(answer):
        # for people; all else are names and numbers
        answer |= {name: mask.inside(answer[name]) for name in ("message", "problems") if name in answer}
    return Answer(done.returncode, answer, output)
