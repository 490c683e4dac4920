"""Restores the config and the end of a run after an attempt that failed before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from distlaunch.base.event_files import append_events, read_event_sample
from distlaunch.base.events import LAUNCHER, RunEnded, StepsDone
from distlaunch.base.run_dir import RunDir, write_atomically
from distlaunch.base.run_files.run_facts import RunFacts


@dataclass(frozen=True)
class EarlierState:
    """The state of a run before an attempt.

    A config that cannot train would make every later resume fail, and a finished run would count as failed.

    Attributes:
        config: the text of the config; None if no attempt has trained one.
        end: the end of the run if it was finished, else None.
    """

    config: str | None
    end: RunEnded | None

    @classmethod
    def of(cls, run: RunDir) -> Self:
        """Return the current state of a run. Call this before an attempt writes its own config and events."""
        config = run.config.read_text(encoding="utf-8") if run.attempts() and run.has_config() else None
        return cls(config, RunFacts.of(read_event_sample(run.events)).ended if run.finished() else None)

    def restore(self, run: RunDir, attempt: int) -> bool:
        """Restore the state after a failed attempt, unless it made a step.

        Returns:
            True if the attempt had replaced the config.
        """
        if any(isinstance(event, StepsDone) and event.attempt == attempt for event in read_event_sample(run.events)):
            return False
        if self.end is not None:
            append_events(run.events, self.end, attempt=self.end.attempt, task=LAUNCHER)
            run.forget_secrets()  # only an unfinished run needs them
        if self.config is None or run.config.read_text(encoding="utf-8") == self.config:
            return False
        write_atomically(run.config, self.config)
        return True
