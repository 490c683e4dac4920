"""Writes error.json, the reason why a task has failed. The task writes it, or the launcher if the task cannot."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from distlaunch.base.code_origins import format_exception, translated
from distlaunch.base.errors import Problem
from distlaunch.base.run_dir import write_atomically
from distlaunch.base.run_files.task_dir import TaskDir
from distlaunch.base.secret_mask import SecretMask

_NAMES = ("kind", "type", "signal")


def write_exception(files: TaskDir, error: BaseException, *, step: int | None = None, user_error: bool = False) -> None:
    """Record an exception that the task has not caught.

    Args:
        step: number of finished steps; None before the first step.
        user_error: whether the message explains the error completely, so that no traceback is shown.
    """
    data = {
        "kind": "exception",
        "type": type(error).__name__,
        "message": translated(str(error)),
        "traceback": format_exception(error),
        "user_error": user_error,
    }
    _write_own(files, data, step)


def write_problems(files: TaskDir, problems: Sequence[Problem]) -> None:
    """Record problems in the config that only a task can find."""
    _write_own(files, {"kind": "config", "problems": [problem.to_plain() for problem in problems]})


def write_signal(files: TaskDir, code: int, step: int | None, host: str, *, oom: bool | None) -> None:
    """Record the signal that killed a task. Raise OSError if it cannot be written.

    Args:
        oom: whether the kernel's OOM killer ended it; None if unknown.
    """
    number = -code
    data = {
        "kind": "signal",
        "signal": signal.Signals(number).name if number in set(signal.Signals) else str(number),
        # the OOM killer only sends SIGKILL
        "out_of_memory": oom if number == signal.SIGKILL else False,
    }
    _write(files, data, step, host)


def write_exit(files: TaskDir, code: int, step: int | None, host: str) -> None:
    """Record the exit code of a task that has not reported a reason. Raise OSError if it cannot be written."""
    _write(files, {"kind": "exit", "code": code}, step, host)


def write_lost(files: TaskDir, reason: str, step: int | None, host: str) -> None:
    """Record that the host of a task was lost. Raise OSError if it cannot be written."""
    _write(files, {"kind": "lost", "message": reason}, step, host)


def write_stall(files: TaskDir, step: int | None, host: str, *, frozen: bool) -> None:
    """Record that a task hung and was ended. Raise OSError if it cannot be written.

    Args:
        frozen: whether it sent no heartbeats.
    """
    _write(files, {"kind": "stall", "frozen": frozen}, step, host)


def _write_own(files: TaskDir, data: dict[str, Any], step: int | None = None) -> None:
    try:
        _write(files, data, step, socket.gethostname())
    except OSError as error:  # a full disk; print the error, so that the launcher reads it
        print(f"{files.error_json} cannot be written: {error.strerror}", file=sys.stderr)
        print(data.get("message") or data["problems"], file=sys.stderr)


def _write(files: TaskDir, data: dict[str, Any], step: int | None, host: str) -> None:
    content = {**data, "step": step, "host": host, "time": time.time()}
    mask = SecretMask(os.environ)
    content = {name: value if name in _NAMES else mask.inside(value) for name, value in content.items()}
    write_atomically(files.error_json, json.dumps(content, indent=2) + "\n")
