"""The record of what a tracker has stored of a run: `tracking/NAME.json` in the run directory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from distlaunch.base import strict_json
from distlaunch.base.plain_types import is_dict
from distlaunch.base.regular_files import read_json
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.config.run import TrackerName


@dataclass(frozen=True)
class Stored:
    """What a tracker has stored of a run. The defaults are those of a run that the tracker does not have.

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
    """Reads and writes what one target of a tracker has stored of a run.

    Args:
        target: see `target_of` in `trackers.py`. Each target has its own run, and so its own entry in the file.
    """

    def __init__(self, run: RunDir, name: TrackerName, target: str) -> None:
        self._file = run.path / "tracking" / f"{name}.json"
        self._target = target

    def read(self) -> Stored:
        try:
            return Stored(**self._targets()[self._target])
        except (KeyError, TypeError):
            return Stored()

    def write(self, stored: Stored) -> None:
        targets = {**self._targets(), self._target: dataclasses.asdict(stored)}
        write_atomically(self._file, strict_json.dumps({"targets": targets}))

    def _targets(self) -> dict[str, Any]:
        try:
            targets = read_json(self._file)["targets"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return targets if is_dict(targets) else {}
