"""Writers of checkpoints: the chief alone, or all processes of a mesh, each with its shards."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from distlaunch.base.folders import make_folder
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.state_files import StateFile, write_file
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.checkpoints.throttle import FULL_SPEED, Throttle
from distlaunch.strategies.protocol import Parts, Program, Strategy
from distlaunch.strategies.state import ShardSlice, State

_CHECKED = 1 << 20  # elements per piece


@dataclass(frozen=True)
class Snapshot:
    """The state that one process writes.

    Attributes:
        slices: see `Parts.snapshot`.
        number: number of the snapshot, the same in all processes.
    """

    state: State
    slices: Mapping[str, ShardSlice]
    number: int = 0

    def nonfinite(self, trained: Collection[str], throttle: Throttle) -> str | None:
        """Return the name of the first value that must be finite but is not, or None."""
        shards = {name for name, shard in self.slices.items() if shard.of in trained}
        return nonfinite_name(self.state, {*trained, *shards}, throttle)


def nonfinite_name(state: State, trained: Collection[str], throttle: Throttle = FULL_SPEED) -> str | None:
    """Return the name of the first value of a state that must be finite but is not, or None.

    Args:
        trained: names of the values that must be finite.
        throttle: slows the check down.
    """
    for name, value in state.items():
        if name in trained and "float" in value.dtype.name and not _is_finite(value, throttle):
            return name
    return None


def _is_finite(array: np.ndarray, throttle: Throttle) -> bool:
    """Return whether all elements are finite.

    The check runs piece by piece, because for some types NumPy holds the interpreter's lock, and training would wait.
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHECKED):
        with throttle.piece():
            piece_is_finite = np.isfinite(flat[start : start + _CHECKED]).all()
        if not piece_is_finite:
            return False
    return True


@dataclass(frozen=True)
class WriteRequest:
    """A request to write a checkpoint.

    Attributes:
        best: whether the epoch is the best so far.
        trained: names of the values that must be finite.
        on_nonfinite: called with the name of a value that is not finite; may raise an error.
        writing: returns a context that is active while this process writes its part, and during the commit.
        given_up: returns whether to stop waiting for other processes.
        throttle: slows checking and writing down.
    """

    progress: Progress
    config: dict[str, Any]
    best: bool
    trained: Collection[str]
    on_nonfinite: Callable[[str], None]
    writing: Callable[[], AbstractContextManager[Any]]
    given_up: Callable[[], bool]
    throttle: Throttle = FULL_SPEED


class Writer(Protocol):
    """Writes checkpoints, or this process's parts of them.

    Attributes:
        takes_part: whether this process writes anything.
    """

    takes_part: bool

    def snapshot(self, program: Program) -> Snapshot:
        """Return the state that this process writes. Every task must call this."""
        ...

    def write(self, snapshot: Snapshot, request: WriteRequest) -> tuple[Path, int] | None:
        """Write a snapshot, in any thread; the chief also commits it, and returns its path and size in bytes.

        Raises:
            OSError: this or another process cannot write its part.
        """
        ...


class ChiefWriter:
    """Implementation of `Writer` in which the chief writes the whole state."""

    def __init__(self, store: CheckpointStore, *, is_chief: bool) -> None:
        self._store, self.takes_part = store, is_chief

    def snapshot(self, program: Program) -> Snapshot:
        return Snapshot(program.snapshot(), {})

    def write(self, snapshot: Snapshot, request: WriteRequest) -> tuple[Path, int] | None:
        with request.writing():
            bad = snapshot.nonfinite(request.trained, request.throttle)
            if bad is not None:
                request.on_nonfinite(bad)
            return self._store.save(
                snapshot.state, request.progress, request.config, best=request.best, throttle=request.throttle
            )


@dataclass(frozen=True)
class _Report:
    """Report of a process about its file.

    Attributes:
        file: the file; None if it could not be written.
        nonfinite: name of a value that must be finite but is not, or None.
        error: reason why the file could not be written, or None.
    """

    file: StateFile | None
    nonfinite: str | None
    error: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        received = json.loads(text)
        return cls(**{**received, "file": StateFile(**received["file"]) if received["file"] else None})


class PartsWriter:
    """Implementation of `Writer` in which each process writes a file with its shards of the state.

    The other processes report to the chief when their files are on the disk. After all reports, the chief commits the
    checkpoint.

    Args:
        key: a unique text for this attempt.
    """

    takes_part = True

    def __init__(self, store: CheckpointStore, parts: Parts, key: str) -> None:
        self._store, self._parts, self._key = store, parts, key
        self._count = 0

    @classmethod
    def agree(cls, strategy: Strategy, store: CheckpointStore) -> Self | None:
        """Return a writer if all processes hold shards and can write to the same disk, and None otherwise.

        The answer is the same in all processes. Every task must call this.
        """
        parts = strategy.parts()
        if parts is None:
            return None
        key = uuid.uuid4().hex
        probe = store.directory / f".probe.{key}.tmp"
        made = strategy.is_chief and _succeeds(lambda: make_folder(probe))
        received = json.loads(strategy.from_chief(json.dumps([str(probe.absolute()), key]).encode()))
        seen = made or _succeeds((Path(received[0]) / str(parts.rank)).touch)
        seen_by = strategy.gather("seen" if seen else "")
        ranks = range(1, parts.number)
        shared = made and all(seen_by.values()) and all((probe / str(rank)).exists() for rank in ranks)
        shared = bool(strategy.from_chief(b"shared" if shared else b""))
        if strategy.is_chief:
            _succeeds(lambda: [path.unlink() for path in probe.iterdir()])
            _succeeds(probe.rmdir)
        return cls(CheckpointStore(Path(received[0]).parent, store.keep), parts, received[1]) if shared else None

    def snapshot(self, program: Program) -> Snapshot:
        self._count += 1
        return Snapshot(*self._parts.snapshot(), self._count)

    def write(self, snapshot: Snapshot, request: WriteRequest) -> tuple[Path, int] | None:
        name, step = f"{self._key}-{snapshot.number}", request.progress.step
        if self._parts.rank != 0:
            with request.writing():
                report = self._write_part(self._store.draft_path(step, name), snapshot, request)
                self._parts.post(name, report.to_json())
            return None
        with self._store.draft(step, name, shared=self._key) as folder:
            with request.writing():
                own = self._write_part(folder, snapshot, request)
            others = self._parts.collect(name, request.given_up)
            if others is None:
                raise OSError("other processes have not written their parts")
            with request.writing():
                return self._commit(folder, [own, *map(_Report.from_json, others)], request)

    def _write_part(self, folder: Path, snapshot: Snapshot, request: WriteRequest) -> _Report:
        bad = snapshot.nonfinite(request.trained, request.throttle)
        name = f"state-{self._parts.rank + 1:05d}-of-{self._parts.number:05d}.safetensors"
        try:
            make_folder(folder)
            return _Report(write_file(folder, name, snapshot.state, snapshot.slices, request.throttle), bad, None)
        except OSError as error:
            return _Report(None, bad, error.strerror or str(error))

    def _commit(self, folder: Path, reports: list[_Report], request: WriteRequest) -> tuple[Path, int]:
        for report in reports:
            if report.nonfinite is not None:
                request.on_nonfinite(report.nonfinite)
        for report in reports:
            if report.error is not None:
                raise OSError(report.error)
        files = [report.file for report in reports if report.file is not None]
        for file in files:
            if os.stat(folder / file.name).st_size != file.num_bytes:
                raise OSError(f"{file.name}: another process has written this file, but it is not visible here")
        path = self._store.commit(folder, files, request.progress, request.config, best=request.best)
        return path, sum(file.num_bytes for file in files)


def _succeeds(action: Callable[[], Any]) -> bool:
    """Return whether an action on the disk has succeeded."""
    try:
        action()
    except OSError:
        return False
    return True
