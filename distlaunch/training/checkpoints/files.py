"""Checkpoints: committed atomically, checksummed, the same for every strategy.

A checkpoint is a directory `step-00000123` with `state.safetensors` (see state_files) and `meta.json` (see meta). It is
written under another name and renamed when complete, so a directory of that name is whole unless the disk damaged
it, which the checksums show.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlaunch.base.errors import CheckpointError
from distlaunch.base.run_dir import BEST, BestName, steps_of
from distlaunch.strategies.state_files import (
    OLDER_STATE_FILE,
    STATE_FILE,
    read_npz,
    read_state,
    write_state,
)
from distlaunch.training.checkpoints.file_copy import FileCopy
from distlaunch.training.checkpoints.meta import SAFETENSORS, NewerFormatError, Progress, read_meta, write_meta

if TYPE_CHECKING:
    from distlaunch.strategies.protocol import State

_BEFORE = ".before.tmp"
"""What a checkpoint's name ends with while another of the same step takes its place."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written, and never will be again."""


class UnreadableError(CheckpointError):
    """The disk does not give a checkpoint out, at least for the moment."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint on disk, read and verified.

    Attributes:
        copy: where other processes may find the same.
    """

    path: Path
    progress: Progress
    config: dict[str, Any]
    state: State
    copy: FileCopy


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: where they are; made when the first is written.
        keep: how many of the newest stay.
        retry_s: pauses before a checkpoint that cannot be read is tried again.
    """

    def __init__(self, directory: Path, keep: int = 3, retry_s: Sequence[float] = (0.5, 2.0)) -> None:
        self.directory, self._keep, self._retry_s = directory, keep, retry_s

    def save(self, state: State, progress: Progress, config: dict[str, Any], *, best: bool = False) -> tuple[Path, int]:
        """Writes a checkpoint, then deletes old ones.

        Args:
            best: it is to be found as `best`, too, until a better one comes.

        Returns:
            Its path, and its size in bytes.

        Raises:
            OSError: it could not be written (a full disk); what was there before is untouched.
        """
        final = self.directory / f"step-{progress.step:08d}"
        # with a dot: `steps_of` does not count it
        temporary = self.directory / f".{final.name}.{os.getpid()}.tmp"
        self.directory.mkdir(parents=True, exist_ok=True)
        # before anything is written: a killed process may have left no room
        self._remove_leftovers()
        try:
            temporary.mkdir()
            digest, num_bytes = _write_state(temporary / STATE_FILE, state)
            meta = write_meta(digest, time.time(), progress, config)
            _write_synced(temporary / "meta.json", meta.encode())
            self._put_in_place(temporary, final)
            if best:
                self._keep_as_best(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        # last: an old checkpoint goes only when the new one is committed
        self._prune(progress.step)
        return final, num_bytes

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        """The same step may be there already, and is lost at no moment: `_recover` finds it."""
        before = final.with_name(f".{final.name}{_BEFORE}")
        if final.exists():
            # a folder cannot take the place of one that is not empty
            final.rename(before)
        try:
            temporary.rename(final)
        except OSError:
            self._recover()
            raise
        # without it a power cut could undo the renaming
        _sync_directory(self.directory)
        # only now: until the new one is on disk this is the only good one
        shutil.rmtree(before, ignore_errors=True)

    def _keep_as_best(self, path: Path) -> None:
        """Beside the others, whatever becomes of them: the same step may be written again with other weights."""
        temporary = self.directory / f".{BEST}.{os.getpid()}.tmp"
        try:
            # linked, not copied: it costs no room, and `_prune` deletes names, not contents
            shutil.copytree(path, temporary, copy_function=_link_or_copy)
            self._put_in_place(temporary, self.directory / BEST)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, oldest first."""
        return steps_of(self.directory)

    def load(self, step: int | BestName) -> Saved:
        """Reads one checkpoint. Raises CheckpointError if it is missing, and DamagedError if it is damaged."""
        path = self._path(step)
        try:
            # opened once: `keep` may delete it meanwhile
            with _open_state(path) as file:
                meta = read_meta((path / "meta.json").read_text(encoding="utf-8"))
                if meta is not None and meta.format >= SAFETENSORS:
                    state, sha256 = read_state(file)
                    # and nothing behind it
                    whole = sha256 == meta.sha256 and not file.read(1)
                else:
                    # npz is read by seeking, so its checksum takes a pass of its own, before NumPy parses anything
                    whole = meta is not None and hashlib.file_digest(file, "sha256").hexdigest() == meta.sha256
                    file.seek(0)
                    state = read_npz(file) if whole else {}
                # both files have a checksum: that of the state is in `meta.json`
                if meta is None or not whole:
                    raise DamagedError(f"{path}: damaged: its content does not match its checksum")
                copy = FileCopy.of(file, meta.sha256)
                return Saved(path, meta.progress, meta.config, state, copy)
        except FileNotFoundError as error:
            if path.exists():
                raise DamagedError(f"{path}: damaged: {Path(error.filename).name} is missing") from None
            have = ", ".join(map(str, self.steps())) or "none"
            which = "no best checkpoint" if step == BEST else f"no checkpoint of step {step}"
            raise CheckpointError(f"{path}: there is {which}; those there are: {have}") from None
        except NewerFormatError as error:
            raise CheckpointError(f"{path}: {error}; use the version that wrote it, or a later one") from None
        except ValueError as error:
            raise DamagedError(f"{path}: cannot be read: {error}") from None
        except OSError as error:
            raise UnreadableError(f"{path}: cannot be read: {error}") from None

    def state_path(self, step: int | BestName) -> Path:
        """The file with a checkpoint's state, if it has been written."""
        return self._path(step) / STATE_FILE

    def _path(self, step: int | BestName) -> Path:
        return self.directory / (BEST if step == BEST else f"step-{step:08d}")

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
        # those that earlier attempts have moved away
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
            # of an earlier attempt at the same step
            shutil.rmtree(damaged, ignore_errors=True)
            (self.directory / f"step-{step:08d}").rename(damaged)

    def _prune(self, newest: int) -> None:
        """Deletes all but the newest, of which the one just written is one, whatever later ones there are."""
        earlier = [step for step in self.steps() if step < newest]
        for step in earlier[: max(0, len(earlier) - (self._keep - 1))]:
            shutil.rmtree(self.directory / f"step-{step:08d}", ignore_errors=True)

    def _recover(self) -> None:
        """Puts back what a process was about to replace by the same step when it was killed."""
        for before in self.directory.glob(f".*{_BEFORE}"):
            final = before.with_name(before.name.removeprefix(".").removesuffix(_BEFORE))
            with contextlib.suppress(OSError):
                if not final.exists():
                    before.rename(final)

    def _remove_leftovers(self) -> None:
        """Half-written checkpoints of processes that were killed."""
        self._recover()
        for path in self.directory.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def _write_state(path: Path, state: State) -> tuple[str, int]:
    """Returns checksum and size."""
    with path.open("wb") as file:
        digest = write_state(file, state)
        file.flush()
        os.fsync(file.fileno())
        return digest, file.tell()


def _link_or_copy(source: str, target: str) -> None:
    """Some network disks have no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _open_state(path: Path) -> BufferedReader:
    try:
        return (path / STATE_FILE).open("rb")
    except FileNotFoundError:
        if not (path / OLDER_STATE_FILE).exists():
            raise
        return (path / OLDER_STATE_FILE).open("rb")


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
