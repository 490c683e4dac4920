"""The run directory across hosts: sends each host the files it needs, and gets back those that its tasks write."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from distlaunch.agent.remote import file_transfer
from distlaunch.base.run_dir import RunDir, checkpoint_name
from distlaunch.engines.remote.answers import raise_for, refusals
from distlaunch.engines.remote.link import Link

_ANSWER_S = 60.0
"""A disk of the network may take its time."""


def open_run(run: RunDir, links: Sequence[Link]) -> dict[str, list[int]]:
    """Ask each host for the run directory; return the checkpoints of hosts that have a copy of their own.

    Raises UsageError that says which host cannot have one, and why.
    """
    nonce = f".seen-{secrets.token_hex(8)}"
    # a fresh name: what a network disk remembers of older ones does not matter
    (run.path / nonce).touch()
    try:
        pending = {link.name: link.request("open", root=str(run.path), nonce=nonce) for link in links}
        failed = refusals(pending, _ANSWER_S)
    finally:
        (run.path / nonce).unlink(missing_ok=True)
    raise_for(dict(sorted(failed.items())))
    answers = {name: answer.result().fields for name, answer in pending.items()}
    return {name: list(fields["checkpoints"]) for name, fields in answers.items() if not fields["shared"]}


def what_tasks_read(run: RunDir, attempt: int, *, checkpoints_there: Sequence[int] | None) -> Iterator[bytes]:
    """Return the messages that write the files of an attempt into a host's copy of the run.

    Args:
        checkpoints_there: checkpoints that the copy has; None if its tasks read none.
    """
    # a script has no config, and a first attempt no events
    for path in (run.attempt_config(attempt), run.events):
        if path.exists():
            yield from file_transfer.send_file(path, _name(run, path))
    if checkpoints_there is None:
        return
    there = set(map(checkpoint_name, checkpoints_there))
    folders = [path for path in (run.checkpoints, run.path / "preprocessing", run.compiled) if path.is_dir()]
    for folder in folders:
        for path in sorted(folder.iterdir()):
            is_there = folder == run.checkpoints and path.name in there
            if path.name.startswith(".") or is_there:
                continue
            send = file_transfer.send_folder if path.is_dir() else file_transfer.send_file
            yield from send(path, _name(run, path))


def _name(run: RunDir, path: Path) -> str:
    return path.relative_to(run.path).as_posix()
