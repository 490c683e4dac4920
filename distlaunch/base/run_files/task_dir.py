"""The files of a task."""

from __future__ import annotations

from pathlib import Path

EVENTS, HEARTBEAT = "events.jsonl", "heartbeat"


class TaskDir:
    """The files of one task in one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stdout_log = path / "stdout.log"
        self.stderr_log = path / "stderr.log"
        self.error_json = path / "error.json"
        self.events = path / EVENTS
        self.heartbeat = path / HEARTBEAT
        self.memory = path / "memory"
        """The `MemoryReport` of a timed trial."""

    def archive_error(self) -> None:
        """Rename error.json to error-N.json before the task's next process may write another."""
        if self.error_json.exists():
            number = len(list(self.path.glob("error-*.json"))) + 1
            self.error_json.replace(self.path / f"error-{number}.json")
