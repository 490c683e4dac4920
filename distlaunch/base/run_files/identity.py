"""The name and number of a run: `run.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from distlaunch.base.regular_files import read_json

_MOST_BYTES = 64 * 1024


class Identity(NamedTuple):
    """The name under which a run was started, and how many runs of that name there were by then, itself included.

    The name of a folder alone does not give them: `exp-2` is the second run called `exp`, or the first called `exp-2`.
    """

    name: str
    number: int

    @property
    def folder(self) -> str:
        """The name of the run's folder, unless it was renamed or copied."""
        return self.name if self.number == 1 else f"{self.name}-{self.number}"

    @staticmethod
    def read(path: Path) -> Identity | None:
        """Return what `to_plain` has written, or None if there is no such file or it holds something else."""
        try:
            plain = read_json(path, _MOST_BYTES)
            name, number = plain["name"], plain["number"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # `type`: True is an int, too
        return Identity(name, number) if isinstance(name, str) and type(number) is int and number > 0 else None

    def to_plain(self) -> dict[str, Any]:
        return self._asdict()
