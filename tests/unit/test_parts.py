"""Checkpoints that several processes write together, each its parts; here threads with a store in memory."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

pytest.importorskip("tensorflow")


from distlaunch.base.errors import NonFiniteError
from distlaunch.checkpoints import state_files
from distlaunch.checkpoints.distribution import ChiefState
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.state_files import FileDamagedError, read_files, write_file
from distlaunch.checkpoints.store import CheckpointStore, DamagedError
from distlaunch.checkpoints.writers import PartsWriter, WriteRequest
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.mesh.parts import Block, MeshParts, StoredVariable, assign_blocks
from distlaunch.strategies.protocol import Strategy
from distlaunch.strategies.state import ShardSlice, State
from tests.unit.test_peers import DEADLINE_S, MemoryStore

VALUES = {
    "model/rows": np.arange(40, dtype=np.float32).reshape(8, 5),
    "model/columns": np.arange(48, dtype=np.int64).reshape(6, 8),
    "model/both": np.arange(64, dtype=np.float16).astype(ml_dtypes.bfloat16).reshape(8, 8),
    "model/whole": np.arange(3.0),
    "optimizer/iteration": np.array(7, np.int64),
}
AXES = {"model/rows": (0,), "model/columns": (1,), "model/both": (0, 1)}
LOGS = {"log/steps_in_epoch": np.array(3)}
WHOLE = {**LOGS, **VALUES}
NAMES = ["state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"]


class Mesh:
    """Variables over two processes with two devices each: rows lie over the devices, columns in the processes too."""

    def __init__(self, values: State) -> None:
        self._values = values

    def stored(self) -> dict[str, StoredVariable]:
        return {name: self._held(value, AXES.get(name, ())) for name, value in self._values.items()}

    def _held(self, value: np.ndarray, axes: tuple[int, ...]) -> StoredVariable:
        devices = [(device // 2, _block(value.shape, axes, divmod(device, 2))) for device in range(4)]

        def value_of(block: Block) -> np.ndarray:
            return value[tuple(slice(*bounds) for bounds in block)].copy()

        return StoredVariable(value.shape, value.itemsize, devices, value_of)

    def log_state(self) -> State:
        return dict(LOGS)


def _block(shape: tuple[int, ...], axes: tuple[int, ...], place: tuple[int, int]) -> Block:
    bounds = [(0, size) for size in shape]
    for axis, at in zip(axes, place, strict=False):
        half = shape[axis] // 2
        bounds[axis] = (at * half, (at + 1) * half)
    return tuple(bounds)


class Worker(Strategy):
    """Strategy in one process of the mesh."""

    def __init__(self, rank: int, store: MemoryStore, values: State) -> None:
        self._peers = Peers(2, rank, store)
        self._parts = MeshParts(self._peers, Mesh(values))

    def gather(self, message: str) -> dict[str, str]:
        return {str(rank): told for rank, told in enumerate(self._peers.gather(message))}

    def parts(self) -> MeshParts:
        return self._parts


@dataclass
class Job:
    """Both processes, and the folder that each has for checkpoints."""

    folders: list[Path]
    values: State
    store: MemoryStore

    def in_each(self, action: Callable[[Worker, CheckpointStore], Any]) -> list[Any]:
        # saving and restoring need neither a model nor a program
        workers = [Worker(rank, self.store, self.values) for rank in range(2)]  # pyright: ignore[reportAbstractUsage]
        stores = [CheckpointStore(folder) for folder in self.folders]
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(action, worker, store) for worker, store in zip(workers, stores, strict=True)]
            return [one.result(DEADLINE_S) for one in running]

    def agreed(self) -> list[PartsWriter]:
        return self.in_each(PartsWriter.agree)

    def save(self, writers: list[PartsWriter], step: int = 5, ranks: tuple[int, ...] = (0, 1)) -> Any:
        """Write a checkpoint in each process of `ranks`, and return or raise the result of the chief."""
        snapshots = [writer.snapshot(None) for writer in writers]  # type: ignore[arg-type]
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(writers[rank].write, snapshots[rank], order(step, ranks)) for rank in ranks]
            results = [one.exception(DEADLINE_S) or one.result() for one in running]
        assert results[1:] in ([], [None])
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]


def order(step: int, ranks: tuple[int, ...]) -> WriteRequest:
    def bad(name: str) -> None:
        raise NonFiniteError(name)

    alone = len(ranks) == 1
    return WriteRequest(Progress(step=step), {}, False, {"model/rows"}, bad, nullcontext, lambda: alone)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job([tmp_path / "checkpoints"] * 2, dict(VALUES), MemoryStore())


def same(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(
        value.dtype == other[name].dtype and np.array_equal(value, other[name]) for name, value in state.items()
    )


def test_each_block_is_written_once_by_one_who_holds_it() -> None:
    stored = Mesh(VALUES).stored()
    written = assign_blocks(stored, 2)
    assert not set(written[0]) & set(written[1])
    for rank, part in enumerate(written):
        assert all((rank, block) in stored[name].devices for name, block in part)
    blocks = {(name, block) for name, one in stored.items() for _, block in one.devices}
    assert {*written[0], *written[1]} == blocks
    sizes = [sum(stored[name].value_of(block).nbytes for name, block in part) for part in written]
    assert abs(sizes[0] - sizes[1]) <= max(value.nbytes for value in VALUES.values()) / 2


def test_what_both_have_written_is_whole(job: Job) -> None:
    path, num_bytes = job.save(job.agreed())
    assert sorted(file.name for file in path.iterdir()) == ["meta.json", *NAMES]
    assert num_bytes == sum((path / name).stat().st_size for name in NAMES)
    store = CheckpointStore(job.folders[0])
    assert same(store.load(5).state, WHOLE)
    assert [file.name for file in job.folders[0].iterdir()] == ["step-00000005"]
    with safe_open(path / NAMES[1], framework="numpy") as file:  # as other tools see it
        assert all(name.partition("[")[0] in WHOLE for name in file.keys())  # noqa: SIM118 (no mapping)
    assert not [key for key in job.store.values if "post" in key], "what was read is deleted"


def test_each_sees_its_own_folder(job: Job, tmp_path: Path) -> None:
    job.folders[1] = tmp_path / "elsewhere"
    writers = job.agreed()
    assert None not in writers, "the chief's folder is on this disk, too"
    job.save(writers)
    assert CheckpointStore(job.folders[0]).steps() == [5]


def test_no_disk_is_shared(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "touch", no)
    assert job.agreed() == [None, None]
    assert list(job.folders[0].iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "header"])
def test_a_damaged_part_is_named_and_the_one_before_is_taken(job: Job, name: str, damage: str) -> None:
    writers = job.agreed()
    job.save(writers, step=5)
    path, _ = job.save(writers, step=6)
    data = (path / name).read_bytes()
    at = 20 if damage == "header" else -1
    if damage == "missing":
        (path / name).unlink()
    else:
        flipped = bytearray(data)
        flipped[at] ^= 1
        (path / name).write_bytes(data[:-1] if damage == "truncate" else flipped)
    store, heard = CheckpointStore(job.folders[0]), []
    with pytest.raises(DamagedError, match=name):
        store.load(6)
    with pytest.raises(DamagedError, match=name):
        store.load(6, ChiefState(on_this_host=True).read)
    saved = store.newest_good(lambda step, error: heard.append(step), ChiefState(on_this_host=True).read)
    assert saved is not None
    assert (saved.progress.step, heard) == (5, [6])
    assert same(saved.state, WHOLE)


def test_a_part_that_no_file_has_is_noticed(tmp_path: Path) -> None:
    whole = VALUES["model/rows"]
    cut = ShardSlice("model/rows", whole.shape, (0, 0))
    file = write_file(tmp_path, "one", {"half": whole[:4]}, {"half": cut})
    with pytest.raises(FileDamagedError, match="parts of 'model/rows' are missing"):
        read_files(tmp_path, [file])


def test_without_every_part_nothing_is_committed(job: Job) -> None:
    """If the other process is killed, the chief gives up, and a later attempt removes the unfinished files."""
    writers = job.agreed()
    with pytest.raises(OSError, match="other processes have not written"):
        job.save(writers, ranks=(0,))
    killed = job.folders[0] / ".step-00000005.killed-1.tmp"
    killed.mkdir()
    (killed / NAMES[0]).write_bytes(b"torn")
    assert CheckpointStore(job.folders[0]).newest_good() is None
    job.store = MemoryStore()
    job.save(job.agreed(), step=6)
    assert [path.name for path in job.folders[0].iterdir()] == ["step-00000006"]


def test_a_disk_that_is_full_for_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = job.agreed()
    job.save(writers, step=5)

    def full(folder: Path, name: str, *words: Any) -> Any:
        if name == NAMES[1]:
            raise OSError(28, "No space left on device")
        return write_file(folder, name, *words)

    monkeypatch.setattr("distlaunch.checkpoints.writers.write_file", full)
    with pytest.raises(OSError, match="No space left"):
        job.save(writers, step=6)
    monkeypatch.undo()
    assert [path.name for path in job.folders[0].iterdir()] == ["step-00000005"]
    job.save(writers, step=7)
    assert CheckpointStore(job.folders[0]).steps() == [5, 7]


@pytest.mark.parametrize("row", [0, -1])
def test_what_is_not_finite_in_any_part_is_not_committed(job: Job, row: int) -> None:
    bad = VALUES["model/rows"].copy()
    bad[row] = np.nan
    job.values["model/rows"] = bad
    with pytest.raises(NonFiniteError, match=r"model/rows\["):
        job.save(job.agreed())
    assert list(job.folders[0].iterdir()) == []


def test_a_process_that_is_ahead_loses_nothing(job: Job) -> None:
    """It may have begun to write the next one when the chief's thread begins to write this one."""
    chief, other = job.agreed()
    first, second = ([writer.snapshot(None) for _ in range(2)] for writer in (chief, other))  # type: ignore[arg-type]
    for number, step in enumerate((5, 6)):
        other.write(second[number], order(step, (0, 1)))
    for number, step in enumerate((5, 6)):
        chief.write(first[number], order(step, (0, 1)))
    store = CheckpointStore(job.folders[0])
    assert store.steps() == [5, 6]
    assert same(store.load(6).state, WHOLE)


def test_only_the_commit_and_the_own_part_count_as_writing(job: Job) -> None:
    """While the chief waits for others, it has nothing to finish: it may be stopped if one of them is gone."""
    chief, other = job.agreed()
    snapshots = [writer.snapshot(None) for writer in (chief, other)]  # type: ignore[arg-type]
    entered, waiting, told = itertools.count(1), threading.Event(), []

    class Writing:
        def __enter__(self) -> None:
            self.number = next(entered)

        def __exit__(self, *_: object) -> None:
            told.append(self.number)
            waiting.set()

    ordered = order(5, (0, 1))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(chief.write, snapshots[0], WriteRequest(**{**vars(ordered), "writing": Writing}))
        assert waiting.wait(DEADLINE_S)
        assert told == [1]
        other.write(snapshots[1], ordered)
        done.result(DEADLINE_S)
    assert told == [1, 2]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_blocks_are_read_alone(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the files hold and whichever blocks are wanted: those are right, and other pieces are not looked at."""
    folder = tmp_path_factory.getbasetemp() / "blocks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, shape[axis]))
    block = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "PIECE_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        files = []
        for number, bounds in enumerate(((0, at), (at, shape[axis]))):
            start = tuple(bounds[0] if dimension == axis else 0 for dimension in range(len(shape)))
            part = np.take(whole, range(*bounds), axis)
            cut = ShardSlice("x", shape, start)
            files.append(write_file(folder, str(number), {"p": part}, {"p": cut}))
        found = read_files(folder, files, {"x": [block]})["x"]
        assert np.array_equal(found[block], whole[block])
        assert np.all((found == 0) | (found == whole))
        assert np.array_equal(read_files(folder, files)["x"], whole)


def test_a_piece_that_is_not_wanted_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "PIECE_BYTES", 256)
    whole = np.arange(1024, dtype=np.float32).reshape(64, 16)
    file = write_file(tmp_path, "one", {"x": whole}, {})
    data = bytearray((tmp_path / "one").read_bytes())
    data[-1] ^= 1
    (tmp_path / "one").write_bytes(data)
    found = read_files(tmp_path, [file], {"x": [(slice(0, 8), slice(0, 16))]})["x"]
    assert np.array_equal(found[:8], whole[:8])
    assert not found[32:].any()
    with pytest.raises(FileDamagedError, match="does not match its checksum"):
        read_files(tmp_path, [file], {"x": [(slice(60, 64), slice(0, 16))]})
