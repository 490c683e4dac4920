"""Sends each host the files of the run directory that its tasks read."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from distlaunch.agent.remote import file_transfer
from distlaunch.base.run_dir import RunDir, checkpoint_name
from distlaunch.engines.remote.answers import raise_for, refusals
from distlaunch.engines.remote.link import Link
from distlaunch.plan.train import LaunchPlan

_ANSWER_S = 60.0
"""Time for an answer, which includes access to a network disk, and the end of an earlier agent on the host."""
_MAX_PATH_LENGTH = 4096


class OpenedRun(NamedTuple):
    """The run directory on the hosts of an attempt.

    Attributes:
        copies: for each host that has a copy of the run directory, the checkpoints in the copy.
        kept: for each host that has moved an earlier copy aside, the path of that copy.
    """

    copies: dict[str, list[int]]
    kept: dict[str, str]


def open_run(run: RunDir, links: Sequence[Link]) -> OpenedRun:
    """Open the run directory on each host.

    Raises UsageError if a host cannot open the directory. The message gives the reason.
    """
    nonce = f".seen-{secrets.token_hex(8)}"
    # a network disk may have cached that an older name does not exist, so use a new name
    (run.path / nonce).touch()
    try:
        pending = {link.name: link.request("open", root=str(run.path), nonce=nonce) for link in links}
        failed = refusals(pending, _ANSWER_S)
    finally:
        (run.path / nonce).unlink(missing_ok=True)
    raise_for(dict(sorted(failed.items())))
    answers = {name: answer.result().fields for name, answer in pending.items()}
    copies = {name: list(fields["checkpoints"]) for name, fields in answers.items() if not fields["shared"]}
    return OpenedRun(
        copies, {name: fields["kept"][:_MAX_PATH_LENGTH] for name, fields in answers.items() if fields["kept"]}
    )


def messages_with_run_files(
    run: RunDir, attempt: int, *, existing_checkpoints: Sequence[int] | None
) -> Iterator[bytes]:
    """Yield the messages that write the files of an attempt into a host's copy of the run.

    Args:
        existing_checkpoints: checkpoints that the copy already has. None if the host's tasks read no checkpoints; only
            the config and the events are then sent.
    """
    # a script has no config, and a first attempt has no events
    for path in (run.attempt_config(attempt), run.events):
        if path.exists():
            yield from file_transfer.send_file(path, _name(run, path))
    if existing_checkpoints is None:
        return
    existing_names = set(map(checkpoint_name, existing_checkpoints))
    folders = [path for path in (run.checkpoints, run.path / "preprocessing", run.compiled) if path.is_dir()]
    for folder in folders:
        for path in sorted(folder.iterdir()):
            exists = folder == run.checkpoints and path.name in existing_names
            if path.name.startswith(".") or exists:
                continue
            send = file_transfer.send_folder if path.is_dir() else file_transfer.send_file
            yield from send(path, _name(run, path))


def replaced_by_tasks(plan: LaunchPlan) -> list[str]:
    """Return the names of files that tasks replace while the launcher waits for them, in the order of writing."""
    if plan.mode != "verify":
        return []
    run, attempt = RunDir(plan.run_dir), plan.attempt
    paths = [*(task.files.memory for task in plan.tasks), run.record(attempt), run.round_result(attempt)]
    return [_name(run, path) for path in paths]


def _name(run: RunDir, path: Path) -> str:
    return path.relative_to(run.path).as_posix()
