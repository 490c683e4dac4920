"""The record of a job in a scheduler's queue, and the state that the queue reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from distlaunch.base.regular_files import read_json

Phase = Literal["pending", "running", "ended"]


class Submission(NamedTuple):
    """A job that was submitted to train a run.

    Attributes:
        engine: whose queue it is in.
        time: seconds since the epoch.
        cluster: of several that the queue's commands know; empty: the usual one.
    """

    engine: str
    job: str
    time: float
    cluster: str = ""

    @staticmethod
    def read(path: Path) -> Submission | None:
        """What `to_plain` has made of it; None: there is none."""
        try:
            plain = read_json(path)
            return Submission(
                str(plain["engine"]), str(plain["job"]), float(plain["time"]), str(plain.get("cluster", ""))
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def to_plain(self) -> dict[str, Any]:
        return self._asdict()


class JobState(NamedTuple):
    """How a submitted job stands.

    Attributes:
        word: what the queue calls it, such as `PENDING`; empty: the queue has forgotten the job.
        why: its reason to wait, as the queue reports it.
    """

    phase: Phase
    word: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why and self.phase == "pending" else self.word
