"""Checkpoints: committed atomically, checksummed, the same for every strategy.

A checkpoint is a directory `step-00000123` with `state.npz` (arrays by name) and `meta.json` (step, epoch, config,
checksums of both). It is written under another name and renamed when complete, so a directory of that name is whole
unless the disk damaged it, which the checksum tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from distlaunch.errors import CheckpointError
from distlaunch.run_dir import steps_of
from distlaunch.strategies.protocol import State

_PLAIN = "biufc"  # kinds of types that npz files hold by themselves


@dataclass(frozen=True)
class Progress:
    """Where training stands.

    Attributes:
        step: global batches done since the run began.
        epoch: the epoch in progress, or the next one if `step_in_epoch` is 0.
        step_in_epoch: batches of that epoch done.
        history: values of the finished epochs, by name.
        callbacks: plain attributes of the callbacks, by position.
        finished: a callback ended training early.
        pending_logs: training values of an epoch whose steps are done but whose validation is not.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    pending_logs: dict[str, float] | None = None


@dataclass(frozen=True)
class Saved:
    """One checkpoint on disk, read and verified."""

    path: Path
    progress: Progress
    config: dict[str, Any]
    state: State


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: where they are; made when the first is written.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, keep: int = 3) -> None:
        self.directory, self._keep = directory, keep

    def save(self, state: State, progress: Progress, config: dict[str, Any]) -> tuple[Path, int]:
        """Writes a checkpoint, then deletes old ones.

        Returns:
            Its path, and its size in bytes.

        Raises:
            OSError: it could not be written (a full disk); what was there before is untouched.
        """
        final = self.directory / f"step-{progress.step:08d}"
        temporary = self.directory / f".{final.name}.{os.getpid()}.tmp"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        try:
            temporary.mkdir()
            digest, num_bytes = _write_state(temporary / "state.npz", state)
            meta = {"sha256": digest, "saved_at": time.time(), "progress": asdict(progress), "config": config}
            signed = {**meta, "meta_sha256": _digest_of(meta)}
            _write_synced(temporary / "meta.json", json.dumps(signed, indent=1).encode())
            if final.exists():  # the same step again, after a resume
                shutil.rmtree(final)
            temporary.rename(final)
            _sync_directory(self.directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(progress.step)
        return final, num_bytes

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, oldest first."""
        return steps_of(self.directory)

    def load(self, step: int) -> Saved:
        """Reads one checkpoint. Raises CheckpointError if it is missing or damaged."""
        path = self.directory / f"step-{step:08d}"
        try:
            meta = json.loads((path / "meta.json").read_text())
            data = (path / "state.npz").read_bytes()
        except FileNotFoundError:
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: there is no checkpoint of step {step}; those there are: {have}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        own = meta.pop("meta_sha256", None) if isinstance(meta, dict) else None
        if own != _digest_of(meta) or hashlib.sha256(data).hexdigest() != meta["sha256"]:
            raise CheckpointError(f"{path}: damaged: its content does not match its checksum")
        del data
        return Saved(path, Progress(**meta["progress"]), meta["config"], _read_state(path / "state.npz"))

    def newest_good(self, on_damaged: Any = None) -> Saved | None:
        """The newest checkpoint that is whole; `on_damaged(step, reason)` hears of those passed over."""
        for step in reversed(self.steps()):
            try:
                return self.load(step)
            except CheckpointError as error:
                if on_damaged is not None:
                    on_damaged(step, str(error))
        return None

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint, so that it is not counted among those that are kept."""
        damaged = self.directory / f"damaged-step-{step:08d}"
        with contextlib.suppress(OSError):
            shutil.rmtree(damaged, ignore_errors=True)
            (self.directory / f"step-{step:08d}").rename(damaged)

    def _prune(self, newest: int) -> None:
        """Deletes all but the newest, of which the one just written is one, whatever later ones there are."""
        earlier = [step for step in self.steps() if step < newest]
        for step in earlier[: max(0, len(earlier) - (self._keep - 1))]:
            shutil.rmtree(self.directory / f"step-{step:08d}", ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Half-written checkpoints of processes that were killed."""
        for path in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def _digest_of(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _write_state(path: Path, state: State) -> tuple[str, int]:
    """Returns checksum and size. Types that npz does not know, such as bfloat16, are stored as integers."""
    plain = {name: value if value.dtype.kind in _PLAIN else _as_integers(value) for name, value in state.items()}
    foreign = {name: value.dtype.name for name, value in state.items() if value.dtype.kind not in _PLAIN}
    plain["__dtypes__"] = np.frombuffer(json.dumps(foreign).encode(), np.uint8)
    with path.open("wb") as file:
        # numbers as keys: names may hold what a file name in an archive may not
        arrays: dict[str, Any] = {str(index): value for index, value in enumerate(plain.values())}
        np.savez(file, **arrays, names=np.array(list(plain)))
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest, path.stat().st_size


def _read_state(path: Path) -> State:
    with np.load(path, allow_pickle=False) as archive:
        state = {str(name): archive[str(index)] for index, name in enumerate(archive["names"])}
    foreign = json.loads(state.pop("__dtypes__").tobytes())
    return {n: v.view(getattr(ml_dtypes, foreign[n])) if n in foreign else v for n, v in state.items()}


def _as_integers(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse it
            os.fsync(fd)
    finally:
        os.close(fd)
