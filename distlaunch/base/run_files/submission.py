"""The record of a job in a scheduler's queue, and the state that the queue reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from distlaunch.base.plain_types import fits
from distlaunch.base.regular_files import read_json

Phase = Literal["pending", "running", "ended"]


_TEXT = re.compile(r"(?!-)[A-Za-z0-9_.,;%+\[\]-]{0,200}")
_LATEST = 1e11
"""A time in the year 5138, in seconds since 1970. Records with a later time count as malformed."""


class Submission(NamedTuple):
    """A job that was submitted to train a run.

    Attributes:
        engine: the engine whose queue has the job.
        job: the number of the job.
        time: when it was submitted, in seconds since 1970.
        cluster: the cluster of the job if the queue has several; empty for the default cluster.
    """

    engine: str
    job: str
    time: float
    cluster: str = ""

    @staticmethod
    def read(path: Path) -> Submission | None:
        """Read a submission from a file with the result of `to_plain`; return None if it is missing or malformed."""
        try:
            plain: dict[str, Any] = read_json(path)
            made = Submission(plain["engine"], plain["job"], plain["time"], plain.get("cluster", ""))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        # check the texts, since they become arguments of the queue's commands
        texts: tuple[Any, ...] = (made.engine, made.job, made.cluster)
        fit = all(isinstance(text, str) and _TEXT.fullmatch(text) for text in texts) and made.engine and made.job
        return made if fit and fits(made.time, float) and 0 <= made.time < _LATEST else None

    def to_plain(self) -> dict[str, Any]:
        return self._asdict()


class JobState(NamedTuple):
    """The state of a submitted job.

    Attributes:
        word: the queue's name of the state, such as `PENDING`; empty if the queue has forgotten the job.
        why: the reason why it is pending, as the queue reports it.
    """

    phase: Phase
    word: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why and self.phase == "pending" else self.word
