"""The record of what a tracker has stored of a run: `tracking/NAME.json` in the run directory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch.base import strict_json
from distlaunch.base.plain_types import is_dict
from distlaunch.base.regular_files import read_json
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.config.run import TrackerName
from distlaunch.runs.tracking.trackers import Target


@dataclass(frozen=True)
class Stored:
    """The part of a run that a tracker has stored. The defaults stand for a run that the tracker does not have.

    Attributes:
        id: identifies the run in the tracker.
        step: the last step whose values within an epoch are stored.
        epoch_step: the last step of the last epoch whose values are stored.
        rows: number of stored rows.
        ended: time of the run's last end that is stored, in seconds since 1970.
    """

    id: str = ""
    step: int = -1
    epoch_step: int = -1
    rows: int = 0
    ended: float = 0.0


class StoredRecord:
    """Reads and writes what one target of a tracker has stored of a run. Each target has its own entry in the file."""

    def __init__(self, run: RunDir, name: TrackerName, target: Target) -> None:
        self._run, self._target = run, target
        self._name: TrackerName = name
        self._file = _file_of(run, name)

    def read(self) -> Stored:
        try:
            entry = {**_entries(self._file)[self._target.address]}
            path = str(entry.pop("path"))
            stored = Stored(**entry)
        except (KeyError, TypeError):
            return Stored()
        return Stored() if self._is_copied(path, stored.id) else stored

    def write(self, stored: Stored) -> None:
        entry = {**dataclasses.asdict(stored), "path": str(self._run.path)}
        entries = {**_entries(self._file), self._target.address: entry}
        write_atomically(self._file, strict_json.dumps({"targets": entries}))

    def _is_copied(self, path: str, id: str) -> bool:
        """Return True if an entry belongs to another run directory, of which this one is a copy.

        Args:
            path: the run directory for which the entry was written. If it has no such entry, this one was moved.
            id: the identifier in the entry.
        """
        if self._target.in_run_dir:
            return False
        original = _file_of(RunDir(path), self._name)
        try:
            # one folder may have several paths
            is_same = original.samefile(self._file)
        except (OSError, ValueError):
            return False
        entry = _entries(original).get(self._target.address)
        return not is_same and is_dict(entry) and entry.get("id") == id


def _file_of(run: RunDir, name: TrackerName) -> Path:
    return run.path / "tracking" / f"{name}.json"


def _entries(file: Path) -> dict[str, Any]:
    try:
        entries = read_json(file)["targets"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return entries if is_dict(entries) else {}
