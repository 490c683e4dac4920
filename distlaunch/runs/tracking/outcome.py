"""The option and the exit codes of the process that sends a run to a tracker."""

from __future__ import annotations

from enum import IntEnum

UNLESS_BUSY = "--unless-busy"


class SendOutcome(IntEnum):
    """How the process ended, if it did not fail."""

    SENT = 0
    NOTHING_NEW = 10
    """The tracker had everything before."""
    BUSY = 11
    """Another process sends the run to this tracker, such as that of the run's launcher."""
