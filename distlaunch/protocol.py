"""What launcher and worker agree on beside argv, files and exit codes: environment variables and signals."""

from __future__ import annotations

import signal

LIFELINE_FD = "DISTLAUNCH_LIFELINE_FD"
"""Number of an inherited file descriptor; at its end of file the launcher is gone and the task's process group ends."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Ask a task to stop: after the step that all tasks agree on, with a checkpoint, and exit code 4."""

DUMP_SIGNAL = signal.SIGUSR2
"""Asks a task to write its Python stacks to its stderr log."""
