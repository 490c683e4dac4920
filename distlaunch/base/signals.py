"""The signals between the launcher and its tasks."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1 for Slurm's `--signal=USR1@90`
"""Signals that ask a task to stop after the step on which all tasks agree, with a checkpoint and exit code 4."""

JOB_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask the launcher to end the job."""

DUMP_SIGNAL = signal.SIGUSR2
"""Signal that asks a task to write its Python stacks to its stderr log."""
