"""Decides which files of a run a host may send: only files that tasks write.

Otherwise an attacker who controls a host could replace the run's `config.yaml`, which names the code of the next
attempt.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePosixPath

from distlaunch.agent.remote.frames import Frame, FrameError

_LAUNCHERS = frozenset({
    "config.yaml", "plan.json", "environment.json", "run.json", "report.html", "launcher.log", "job.sh", "job.json",
    "job.exit", "job.not_before",
})  # fmt: skip
"""Files that only a launcher writes, into a run or an attempt."""
_CODE = (".py", ".pyc", ".pyd", ".so", ".pth", ".sh")
"""Suffixes of files that Python imports or that shells execute."""
_PART = re.compile(r"\.(?P<name>.+)\.part\.tmp\Z")
_TASK = re.compile(r"[a-z_]+-[0-9]{1,9}\Z")
_ATTEMPT = re.compile(r"[0-9]{1,9}\Z")
OF_CHIEF = ("record.json", "round-result.json")
"""Files of an attempt, other than its events, that only the chief writes."""
_OF_ATTEMPT = ("events.jsonl", *OF_CHIEF)
_APPENDED = ("events.jsonl", "stdout.log", "stderr.log")
"""Files that hosts may only append to."""
_MAX_NAME_LENGTH, _MAX_DEPTH = 1024, 32

LOG_BYTES = 8 << 30
_MOST_BYTES = {"events.jsonl": 1 << 30, "stdout.log": LOG_BYTES, "stderr.log": LOG_BYTES, "error.json": 16 << 20,
               "record.json": 1 << 30, "round-result.json": 4096, "memory": 4096}  # fmt: skip
_MOST_OTHER_BYTES = 1 << 40
MAX_FILES = 1_000_000
"""Files that one host may send in an attempt."""


def is_written_by_tasks(name: str) -> bool:
    """Return True if tasks write a file with this name in a run directory."""
    parts = _parts(name)
    if not parts or len(name) > _MAX_NAME_LENGTH or len(parts) > _MAX_DEPTH:
        return False
    if any(part.startswith(".") for part in parts) or parts[-1].lower().endswith(_CODE):
        return False
    if parts[0] != "attempts":
        return parts[0] not in _LAUNCHERS
    if len(parts) < 3 or not _ATTEMPT.match(parts[1]):
        return False
    if len(parts) == 3:
        return parts[2] in _OF_ATTEMPT
    return bool(_TASK.match(parts[2])) or parts[2] == "compiled"


def most_bytes(name: str) -> int:
    """Return the maximum size in bytes of a file with this name."""
    return _MOST_BYTES.get(_own_name(_parts(_whole(name))), _MOST_OTHER_BYTES)


def check(frame: Frame, attempt: int, others: Collection[str] = ()) -> None:
    """Raise FrameError if a message of a host changes a file in a way that no task does.

    Args:
        others: names that this host must not write: the folders of tasks that run on other hosts in this attempt,
            and what only the chief writes unless it runs on this host.
    """
    name = frame.text("path")
    final = frame.text("to") if frame.kind == "move" else name
    if not is_written_by_tasks(_whole(final)) or not is_written_by_tasks(_whole(name)):
        raise FrameError(f"{frame.kind} of {final!r:.80}, which no task writes")
    parts = _parts(_whole(final))
    # files of earlier attempts have no owner here, since their tasks may have run on other hosts
    owner = parts[0] if parts[0] != "attempts" else parts[2] if int(parts[1]) == attempt else ""
    if owner in others:
        raise FrameError(f"{frame.kind} of {final!r:.80}, which a task on another host writes")
    is_log = _own_name(parts) in _APPENDED
    if frame.kind == "write" and is_log and not frame.fields.get("fresh"):
        return
    if frame.kind == "move" and name != final and _whole(name) == _whole(final) and not is_log:
        return
    # a host may write and remove incomplete files; it may also remove checkpoints that are no longer kept
    is_part = name != _whole(name)
    is_checkpoint = parts[0] == "checkpoints" and len(parts) == 2
    if (frame.kind == "write" and is_part) or (frame.kind == "remove" and (is_part or is_checkpoint)):
        return
    raise FrameError(f"{frame.kind} of {final!r:.80}, which no task does")


def _own_name(parts: tuple[str, ...]) -> str:
    """Return the name of a file that distlaunch itself writes in a task, or an empty string for another file."""
    if len(parts) == 1:
        known = ("events.jsonl",)
    elif parts[0] == "attempts":
        known = {3: _OF_ATTEMPT, 4: (*_APPENDED, "error.json", "memory")}.get(len(parts), ())
    else:
        known = ()
    return parts[-1] if parts[-1] in known else ""


def _parts(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts


def _whole(name: str) -> str:
    """Return a file's final path, without the prefix and suffix that mark incomplete files and folders."""
    return "/".join(found["name"] if (found := _PART.match(part)) else part for part in _parts(name))
