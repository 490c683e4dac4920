"""Checkpoints: committed atomically, checksummed, the same for every strategy.

A checkpoint is a directory `step-00000123` with `state.npz` (arrays by name) and `meta.json` (see checkpoint_meta). It
is written under another name and renamed when complete, so a directory of that name is whole unless the disk damaged
it, which the checksums show.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from distlaunch.base.errors import CheckpointError
from distlaunch.base.run_dir import steps_of
from distlaunch.strategies.protocol import State
from distlaunch.training.checkpoints.meta import NewerFormatError, Progress, read_meta, write_meta

_BEFORE = ".before.tmp"
"""What a checkpoint's name ends with while another of the same step takes its place."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written, and never will be again."""


class UnreadableError(CheckpointError):
    """The disk does not give a checkpoint out, at least for the moment."""


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
        retry_s: pauses before a checkpoint that cannot be read is tried again.
    """

    def __init__(self, directory: Path, keep: int = 3, retry_s: Sequence[float] = (0.5, 2.0)) -> None:
        self.directory, self._keep, self._retry_s = directory, keep, retry_s

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
            meta = write_meta(digest, time.time(), progress, config)
            _write_synced(temporary / "meta.json", meta.encode())
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
                meta = read_meta((path / "meta.json").read_text(encoding="utf-8"))
                if meta is None or hashlib.file_digest(file, "sha256").hexdigest() != meta.sha256:
                    raise DamagedError(f"{path}: damaged: its content does not match its checksum")
                file.seek(0)
                return Saved(path, meta.progress, meta.config, _read_state(file))
        except FileNotFoundError as error:
            if path.exists():
                raise DamagedError(f"{path}: damaged: {Path(error.filename).name} is missing") from None
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: there is no checkpoint of step {step}; those there are: {have}") from None
        except NewerFormatError as error:
            raise CheckpointError(f"{path}: {error}; use the version that wrote it, or a later one") from None
        except ValueError as error:
            raise DamagedError(f"{path}: cannot be read: {error}") from None
        except OSError as error:
            raise UnreadableError(f"{path}: cannot be read: {error}") from None

    def newest_good(self, on_damaged: Callable[[int, DamagedError], None] = lambda step, error: None) -> Saved | None:
        """The newest checkpoint that is whole, None if none was ever written; to be called while nobody writes.

        Args:
            on_damaged: hears of each newer one that is damaged.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged; or one cannot be read, also when tried again.
        """
        self._recover()
        damaged = []
        for step in reversed(self.steps()):
            try:
                return self._load_patiently(step)
            except DamagedError as error:
                damaged.append(f"step-{step:08d}")
                on_damaged(step, error)
        damaged += sorted(path.name for path in self.directory.glob("damaged-step-*"))
        if not damaged:
            return None
        message = f"{self.directory}: no good checkpoint is left, all are damaged: {', '.join(damaged)}"
        hint = f"restore one of them from a copy; to begin anew on purpose, start a new run, or delete {self.directory}"
        raise CheckpointError(f"{message}; {hint}")

    def _load_patiently(self, step: int) -> Saved:
        """Reads one that may be out of reach for a moment: a network disk that does not answer is no damage."""
        for pause_s in self._retry_s:
            try:
                return self.load(step)
            except UnreadableError:
                threading.Event().wait(pause_s)
        return self.load(step)

    def archive(self, step: int) -> None:
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


def _write_state(path: Path, state: State) -> tuple[str, int]:
    """Returns checksum and size. Types that npz does not know, such as bfloat16, are stored as integers."""
    foreign = {name: value.dtype.name for name, value in state.items() if not _is_plain(value)}
    values = [_as_integers(value) if name in foreign else value for name, value in state.items()]
    # the last is no variable, whatever the others are called
    values.append(np.frombuffer(json.dumps(foreign).encode(), np.uint8))
    with path.open("wb") as file:
        # numbers as keys: names may hold what a file name in an archive may not
        arrays: dict[str, Any] = {str(index): value for index, value in enumerate(values)}
        np.savez(file, **arrays, names=np.array([*state, "__dtypes__"]))
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest, path.stat().st_size


def _read_state(file: BinaryIO) -> State:
    with np.load(file, allow_pickle=False) as archive:
        *names, _ = map(str, archive["names"])
        state = {name: archive[str(index)] for index, name in enumerate(names)}
        foreign = json.loads(archive[str(len(names))].tobytes())
    return {n: v.view(getattr(ml_dtypes, foreign[n])) if n in foreign else v for n, v in state.items()}


def _is_plain(value: np.ndarray) -> bool:
    """Whether npz files hold the type by themselves: `kind` alone calls float8_e5m2 a float of NumPy's."""
    return value.dtype.type.__module__ == "numpy"


def _as_integers(value: np.ndarray) -> np.ndarray:
    return np.require(value, requirements="C").view(f"u{value.dtype.itemsize}")


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
