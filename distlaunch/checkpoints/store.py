"""Stores checkpoints, which are committed atomically, have checksums, and are the same for every strategy.

A checkpoint is a directory `step-00000123` with the state (see `state_files`) and `meta.json` (see `meta`). It is
written under another name and renamed when it is complete. So a directory with the final name is complete, unless the
disk has damaged it, which the checksums detect.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlaunch.base.errors import CheckpointError
from distlaunch.base.folders import make_folder
from distlaunch.base.regular_files import NotRegularError, read_regular
from distlaunch.base.run_dir import BEST, BestName, checkpoint_name, link_or_copy, steps_of
from distlaunch.checkpoints.format import STATE_FILE
from distlaunch.checkpoints.meta import OtherFormatError, Progress, meta_text, read_meta
from distlaunch.checkpoints.state_files import FileDamagedError, StateFile, read_files, write_file
from distlaunch.checkpoints.throttle import FULL_SPEED, Throttle
from distlaunch.strategies.state import State

StateReader = Callable[[Path, Sequence[StateFile]], State]
"""Function that reads and verifies the state in the files of a folder, see `read_files`."""
_BEFORE = ".before.tmp"
"""Suffix of a checkpoint's name while another checkpoint of the same step replaces it."""
_LOOKS, _LOOKS_APART_S = 20, 0.05
"""Number of times to check whether an unreadable checkpoint is being deleted, and the seconds between two checks."""


class DamagedError(CheckpointError):
    """The content of a checkpoint has changed since it was written."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint cannot be read from the disk, perhaps only temporarily."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, read and verified."""

    path: Path
    progress: Progress
    config: dict[str, Any]
    state: State


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: the directory of the checkpoints, created with the first one.
        keep: number of the newest checkpoints that are kept.
        retry_s: pauses before further attempts to read a checkpoint.
    """

    def __init__(self, directory: Path, keep: int = 3, retry_s: Sequence[float] = (0.5, 2.0)) -> None:
        self.directory, self.keep, self._retry_s = directory, keep, retry_s

    def save(
        self,
        state: State,
        progress: Progress,
        config: dict[str, Any],
        *,
        best: bool = False,
        throttle: Throttle = FULL_SPEED,
    ) -> tuple[Path, int]:
        """Write a checkpoint, then delete old ones.

        Args:
            best: whether to keep it also as `best`, until there is a better one.
            throttle: slows the writing down.

        Returns:
            The path of the checkpoint, and its size in bytes.

        Raises:
            OSError: it cannot be written, for instance because the disk is full; earlier checkpoints are unchanged.
        """
        with self.draft(progress.step, str(os.getpid())) as folder:
            file = write_file(folder, STATE_FILE, state, {}, throttle)
            return self.commit(folder, [file], progress, config, best=best), file.num_bytes

    @contextlib.contextmanager
    def draft(self, step: int, name: str, shared: str = "") -> Iterator[Path]:
        """Create a folder for the files of a checkpoint that is not committed yet, and delete it after an error.

        Args:
            name: name by which several processes find the same folder.
            shared: folders with this text in their names are not deleted as leftovers, because other processes may
                already be writing to them; empty to delete all leftovers.
        """
        folder = self.draft_path(step, name)
        make_folder(self.directory)
        self._remove_leftovers(shared)
        try:
            make_folder(folder)  # another process may have created it already
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def draft_path(self, step: int, name: str) -> Path:
        return self.directory / f".{checkpoint_name(step)}.{name}.tmp"

    def commit(
        self, folder: Path, files: Sequence[StateFile], progress: Progress, config: dict[str, Any], *, best: bool
    ) -> Path:
        """Turn a draft whose files are all on the disk into a checkpoint, delete old ones, and return its path."""
        final = self._path(progress.step)
        _write_synced(folder / "meta.json", meta_text(files, time.time(), progress, config).encode())
        _sync_directory(folder)
        if best:
            # first, since the checkpoint says that this epoch is the best, and a resume would keep only better ones
            self._keep_as_best(folder)
        self._put_in_place(folder, final)
        self._prune(progress.step)
        return final

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        """Rename a draft. Until it is in place, the checkpoint that it replaces exists or can be recovered."""
        before = final.with_name(f".{final.name}{_BEFORE}")
        if final.exists():
            # a rename cannot replace a folder that is not empty
            final.rename(before)
        try:
            temporary.rename(final)
        except OSError:
            self._recover()
            raise
        # a power failure could otherwise undo the renaming
        _sync_directory(self.directory)
        # the old checkpoint is deleted only now, when the new one is on the disk
        shutil.rmtree(before, ignore_errors=True)

    def _keep_as_best(self, path: Path) -> None:
        """Keep a checkpoint separately, because the same step may be written again with other weights."""
        temporary = self.directory / f".{BEST}.{os.getpid()}.tmp"
        try:
            # links need no space, and stay valid when `_prune` deletes the checkpoint
            shutil.copytree(path, temporary, copy_function=link_or_copy)
            self._put_in_place(temporary, self.directory / BEST)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def find_as_best(self, epochs: int) -> bool:
        """Make the checkpoint after `epochs` epochs the best one; return False if it does not exist."""
        for step in reversed(self.steps()):
            with contextlib.suppress(OSError, ValueError):
                meta = read_meta(read_regular(self._path(step) / "meta.json"))
                if meta is not None and (meta.progress.epoch, meta.progress.step_in_epoch) == (epochs, 0):
                    self._keep_as_best(self._path(step))
                    return True
        return False

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, oldest first."""
        return steps_of(self.directory)

    def values_id(self, step: int) -> str | None:
        """Return a text that is the same for checkpoints with the same values; None if this one cannot be read now."""
        try:
            meta = read_meta(read_regular(self._path(step) / "meta.json"))
        except (OSError, OtherFormatError):
            return None
        return None if meta is None else " ".join(file.digests for file in meta.files)

    def load(self, step: int | BestName, read: StateReader = read_files) -> Saved:
        """Read one checkpoint.

        Args:
            step: step of the checkpoint, or `best`.
            read: reads the state.

        Raises:
            CheckpointError: the checkpoint is missing, cannot be read, or is damaged (DamagedError).
        """
        path = self._path(step)
        try:
            meta = read_meta(read_regular(path / "meta.json"))
            if meta is None:
                raise DamagedError(f"{path}/meta.json: damaged: its content does not match its checksum")
            return Saved(path, meta.progress, meta.config, read(path, meta.files))
        except FileNotFoundError as error:
            if path.exists():
                raise DamagedError(f"{path}: damaged: {Path(error.filename).name} is missing") from None
            have = ", ".join(map(str, self.steps())) or "none"
            which = "no best checkpoint" if step == BEST else f"no checkpoint of step {step}"
            raise CheckpointError(f"{path}: there is {which}; existing checkpoints: {have}") from None
        except OtherFormatError as error:
            raise CheckpointError(f"{path}: {error}; use the version that wrote it") from None
        except FileDamagedError as error:
            raise DamagedError(f"{path / error.name}: damaged: {error}") from None
        except OSError as error:
            if isinstance(error, NotRegularError) or error.errno in (errno.EFBIG, errno.ELOOP):
                # another kind of file has replaced it, so it will never be readable again
                raise DamagedError(f"{path}: damaged: {error.filename} {error.strerror}") from None
            raise UnreadableCheckpointError(f"{path}: cannot be read: {error}") from None

    def _path(self, step: int | BestName) -> Path:
        return self.directory / (BEST if step == BEST else checkpoint_name(step))

    def newest_good(
        self,
        on_damaged: Callable[[int, DamagedError], None] = lambda step, error: None,
        read: StateReader = read_files,
        *,
        repairs: bool = True,
    ) -> Saved | None:
        """Return the newest checkpoint that is not damaged, or None if there are no checkpoints.

        Args:
            on_damaged: called with each newer checkpoint that is damaged.
            read: reads the state of a checkpoint.
            repairs: whether to restore a checkpoint that a killed process was replacing. This is allowed only while no
                process writes checkpoints. If False, nothing is changed, and if training deletes or replaces a
                checkpoint meanwhile, the newest one is read instead.

        Raises:
            CheckpointError: all checkpoints are damaged, or one cannot be read after several attempts.
        """
        if repairs:
            self._recover()
        damaged = []
        for step in reversed(self.steps()):
            try:
                return self._load_patiently(step, read)
            except CheckpointError as error:
                if not repairs and self._is_being_replaced(step):
                    return self.newest_good(on_damaged, read, repairs=repairs)
                if not isinstance(error, DamagedError):
                    raise
                damaged.append(checkpoint_name(step))
                on_damaged(step, error)
        # damaged checkpoints that earlier attempts have renamed
        damaged += sorted(path.name for path in self.directory.glob("damaged-step-*"))
        if not damaged:
            return None
        message = f"{self.directory}: all checkpoints are damaged: {', '.join(damaged)}"
        hint = (
            f"restore one of them from a copy; to train from the beginning, start a new run or delete {self.directory}"
        )
        raise CheckpointError(f"{message}; {hint}")

    def _is_being_replaced(self, step: int) -> bool:
        """Return whether training has deleted or replaced a checkpoint while it was read; this waits for a moment.

        A checkpoint can have been deleted only if there is a newer one.
        """
        path = self._path(step)
        for _ in range(_LOOKS):
            if not path.exists():
                # it was deleted because there are newer ones, or moved aside until another one of its step replaces it
                return bool(self.steps()) or path.with_name(f".{path.name}{_BEFORE}").exists()
            if self.steps()[-1:] == [step]:
                return False
            threading.Event().wait(_LOOKS_APART_S)
        return False

    def _load_patiently(self, step: int, read: StateReader) -> Saved:
        """Read a checkpoint with retries, because a network disk may be unavailable for a moment."""
        for pause_s in self._retry_s:
            try:
                return self.load(step, read)
            except UnreadableCheckpointError:
                threading.Event().wait(pause_s)
        return self.load(step, read)

    def archive(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it does not count as one of those that are kept."""
        damaged = self.directory / f"damaged-{checkpoint_name(step)}"
        with contextlib.suppress(OSError):
            # remove a damaged checkpoint of the same step from an earlier attempt
            shutil.rmtree(damaged, ignore_errors=True)
            (self.directory / checkpoint_name(step)).rename(damaged)

    def _prune(self, newest: int) -> None:
        """Delete old checkpoints before the step just written; those of later steps are neither deleted nor counted."""
        earlier = [step for step in self.steps() if step < newest]
        for step in earlier[: max(0, len(earlier) - (self.keep - 1))]:
            shutil.rmtree(self.directory / checkpoint_name(step), ignore_errors=True)

    def _recover(self) -> None:
        """Restore a checkpoint whose replacement was interrupted by a kill."""
        for before in self.directory.glob(f".*{_BEFORE}"):
            final = before.with_name(before.name.removeprefix(".").removesuffix(_BEFORE))
            with contextlib.suppress(OSError):
                if not final.exists():
                    before.rename(final)

    def _remove_leftovers(self, shared: str) -> None:
        """Delete half-written checkpoints of processes that were killed."""
        self._recover()
        for path in self.directory.glob(".*.tmp"):
            if not shared or shared not in path.name:
                shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems do not support it
            os.fsync(fd)
    finally:
        os.close(fd)
