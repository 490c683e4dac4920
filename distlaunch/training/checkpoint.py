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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from distlaunch.errors import CheckpointError
from distlaunch.run_dir import steps_of
from distlaunch.strategies.protocol import State

_BEFORE = ".before.tmp"
"""What a checkpoint's name ends with while another of the same step takes its place."""
_PLAIN = "biufc"  # kinds of types that npz files hold by themselves


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written, and never will be again."""


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
        stop_training: a callback of the chief wishes that, within an epoch.
        pending_logs: training values of an epoch whose steps are done but whose validation is not.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    stop_training: bool = False
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
            self._put_in_place(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(progress.step)
        return final, num_bytes

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        """The same step may be there already, and is lost at no moment: `_recover` finds it."""
        before = final.with_name(f".{final.name}{_BEFORE}")
        if final.exists():
            final.rename(before)
        try:
            temporary.rename(final)
        except OSError:
            self._recover()
            raise
        _sync_directory(self.directory)
        shutil.rmtree(before, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, oldest first."""
        return steps_of(self.directory)

    def load(self, step: int) -> Saved:
        """Reads one checkpoint. Raises CheckpointError if it is missing, and DamagedError if it is damaged."""
        path = self.directory / f"step-{step:08d}"
        try:
            # opened once: `keep` may delete it meanwhile
            with (path / "state.npz").open("rb") as file:
                meta = json.loads((path / "meta.json").read_text())
                own = meta.pop("meta_sha256", None) if isinstance(meta, dict) else None
                if own != _digest_of(meta) or hashlib.file_digest(file, "sha256").hexdigest() != meta["sha256"]:
                    raise DamagedError(f"{path}: damaged: its content does not match its checksum")
                file.seek(0)
                return Saved(path, Progress(**meta["progress"]), meta["config"], _read_state(file))
        except FileNotFoundError as error:
            if path.exists():
                raise DamagedError(f"{path}: damaged: {Path(error.filename).name} is missing") from None
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: there is no checkpoint of step {step}; those there are: {have}") from None
        except ValueError as error:
            raise DamagedError(f"{path}: cannot be read: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None

    def newest_good(
        self, on_passed_over: Callable[[int, CheckpointError], None] = lambda step, error: None
    ) -> Saved | None:
        """The newest checkpoint that is whole; to be called while nobody writes.

        Args:
            on_passed_over: hears of newer ones, damaged or unreadable for the moment.
        """
        self._recover()
        for step in reversed(self.steps()):
            try:
                return self.load(step)
            except CheckpointError as error:
                on_passed_over(step, error)
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

    def _recover(self) -> None:
        """Puts back what a process was about to replace by the same step when it was killed."""
        for before in self.directory.glob(f".step-*{_BEFORE}"):
            final = before.with_name(before.name.removeprefix(".").removesuffix(_BEFORE))
            with contextlib.suppress(OSError):
                if not final.exists():
                    before.rename(final)

    def _remove_leftovers(self) -> None:
        """Half-written checkpoints of processes that were killed."""
        self._recover()
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


def _read_state(file: BinaryIO) -> State:
    with np.load(file, allow_pickle=False) as archive:
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
