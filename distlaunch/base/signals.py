"""Signals by which the launcher asks a task for something."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1 as of Slurm's `--signal=USR1@90`
"""Ask a task to stop: after the step that all tasks agree on, with a checkpoint, and exit code 4."""

JOB_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ask the launcher to end the job."""

DUMP_SIGNAL = signal.SIGUSR2
"""Asks a task to write its Python stacks to its stderr log."""
