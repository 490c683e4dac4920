"""Checkpoints: atomic, checksummed, of any type, pruned."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from distlaunch.base.errors import CheckpointError
from distlaunch.checkpoints.format import STATE_FILE
from distlaunch.checkpoints.meta import FORMAT, Progress
from distlaunch.checkpoints.state_files import StateFile, StateFiles
from distlaunch.checkpoints.store import CheckpointStore, DamagedError, UnreadableCheckpointError
from distlaunch.strategies.state import State

READS = f"this version of distlaunch reads format {FORMAT}"
STATE = {
    "model/a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/b": np.array([1.5, -2.25], ml_dtypes.bfloat16),
    "optimizer/iteration": np.array(7, np.int64),
    "seed": np.array([1, 2**32 - 1], np.uint32),
    "flag": np.array(True),
    "names": np.zeros(0, np.float16),
}


def test_everything_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    progress = Progress(step=12, epoch=1, step_in_epoch=2, history={"loss": [1.0]}, callbacks=[{"wait": 1}])
    store.save(STATE, progress, {"seed": 3})
    saved = store.load(12)
    assert (saved.progress, saved.config) == (progress, {"seed": 3})
    assert saved.state.keys() == STATE.keys()
    for name, value in STATE.items():
        assert saved.state[name].dtype == value.dtype
        assert np.array_equal(saved.state[name], value)


def test_scalars_of_foreign_types_keep_their_shape(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save({"a": np.array(1.5, ml_dtypes.bfloat16), "b": np.asfortranarray(np.ones((2, 3)))}, Progress(), {})
    state = store.load(0).state
    assert (state["a"].shape, state["a"].dtype, float(state["a"])) == ((), ml_dtypes.bfloat16, 1.5)
    assert state["b"].shape == (2, 3)


def test_types_that_only_look_like_numpys_come_back(tmp_path: Path) -> None:
    """NumPy counts float8_e5m2 among its floats, and cannot read it."""
    store = CheckpointStore(tmp_path)
    store.save({"__dtypes__": np.array([0.25, -2], ml_dtypes.float8_e5m2)}, Progress(), {})
    [(name, value)] = store.load(0).state.items()
    assert (name, value.dtype, value.tolist()) == ("__dtypes__", ml_dtypes.float8_e5m2, [0.25, -2])


@pytest.mark.parametrize(
    "config",
    [
        {"data": {"class_weight": dict.fromkeys(range(11), 1.0)}},
        {"data": {"class_weight": None}, "model": {"args": {"table": {100: 1, 20: 2, 3: 3}}}},
        {"data": {}, "model": {"args": {"a": {1: 1, "b": 2, None: 3, 2.5: 4, False: 5}, "b": float("nan")}}},
    ],
)
def test_keys_that_are_numbers_are_no_damage(tmp_path: Path, config: dict[str, Any]) -> None:
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=3), config)
    assert store.load(3).progress == Progress(step=3)


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_and_no_damage(tmp_path: Path, version: int) -> None:
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=3), {"data": {}})
    meta = tmp_path / "step-00000003" / "meta.json"
    plain = {**json.loads(meta.read_text()), "format": version}
    del plain["meta_sha256"]
    own = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    meta.write_text(json.dumps({**plain, "meta_sha256": own}))
    with pytest.raises(
        CheckpointError, match=f"format {version}; this version of distlaunch reads format {FORMAT}"
    ) as raised:
        store.load(3)
    assert not isinstance(raised.value, DamagedError)


def same(state: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(state) == list(other) and all(
        value.dtype == other[name].dtype and np.array_equal(value, other[name]) for name, value in state.items()
    )


def test_other_tools_read_the_state(tmp_path: Path) -> None:
    """Also the place of each array: the library refuses files with holes."""
    store = CheckpointStore(tmp_path)
    text, odd = np.array(["a", "bc"]), np.array([1 + 2j])
    path, num_bytes = store.save({**STATE, "text": text, "odd": odd}, Progress(step=1), {})
    assert num_bytes == (path / STATE_FILE).stat().st_size
    with safe_open(path / STATE_FILE, framework="numpy") as file:
        assert set(file.keys()) == {*STATE, "text", "odd"}
        for name, value in STATE.items():
            assert np.array_equal(file.get_tensor(name), value)
        assert json.loads(file.metadata()["types"]) == {"text": text.dtype.str, "odd": "<c16"}
        assert file.get_tensor("odd").tobytes() == odd.tobytes()


def test_one_of_a_later_format_is_refused_and_not_called_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=1), {})
    meta = tmp_path / "step-00000001" / "meta.json"
    meta.write_text(meta.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    with pytest.raises(
        CheckpointError, match=f"format {FORMAT + 1}; this version of distlaunch reads format {FORMAT}"
    ) as caught:
        store.newest_good()
    assert not isinstance(caught.value, DamagedError)


def test_numbers_that_json_does_not_have_come_back(tmp_path: Path) -> None:
    progress = Progress(
        history={"loss": [float("inf"), 1.0]}, callbacks=[{"changed": {"best": -np.inf, "mode": "inf"}}]
    )
    store = CheckpointStore(tmp_path)
    store.save(STATE, progress, {})
    assert store.load(0).progress == progress
    json.loads((tmp_path / "step-00000000" / "meta.json").read_text(), parse_constant=pytest.fail)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 100_000_000):
        store.save(STATE, Progress(step=step), {})
    assert store.steps() == [3, 100_000_000]


def test_none_is_deleted_before_there_are_too_many(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=8)
    for step in range(1, 10):
        store.save(STATE, Progress(step=step), {})
        assert store.steps() == list(range(max(1, step - 7), step + 1))


@pytest.mark.parametrize(
    "damage", ["flip", "flipped number", "truncate", "no meta", "torn meta", "flipped meta", "no state"]
)
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(STATE, Progress(step=step), {})
    state, meta = tmp_path / "step-00000002" / STATE_FILE, tmp_path / "step-00000002" / "meta.json"
    data = state.read_bytes()
    if damage == "flip":
        state.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif damage == "flipped number":  # nothing but the checksum tells
        state.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncate":
        state.write_bytes(data[:-1])
    elif damage == "no meta":
        meta.unlink()
    elif damage == "torn meta":
        meta.write_text(meta.read_text()[:20])
    elif damage == "flipped meta":
        meta.write_text(meta.read_text().replace('"step": 2', '"step": 3'))
    else:
        state.unlink()
    heard = []
    saved = store.newest_good(lambda step, error: heard.append((step, type(error))))
    assert saved is not None
    assert saved.progress.step == 1
    assert heard == [(2, DamagedError)]
    with pytest.raises(DamagedError):
        store.load(2)


def test_one_that_cannot_be_read_now_is_not_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retry_s=(0.0,))
    for step in (1, 2):
        store.save(STATE, Progress(step=step), {})
    meta = tmp_path / "step-00000002" / "meta.json"
    kept = meta.rename(tmp_path / "kept")
    meta.symlink_to("/proc/self/mem")  # whoever reads its beginning gets an OSError, root too
    with pytest.raises(UnreadableCheckpointError, match=r"cannot be read: .*Input/output error"):
        store.newest_good()
    meta.unlink()
    kept.rename(meta)
    assert store.newest_good().progress.step == 2  # type: ignore[union-attr]


def test_one_that_can_be_read_the_second_time_is_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retry_s=())
    store.save(STATE, Progress(step=1), {})
    meta = tmp_path / "step-00000001" / "meta.json"
    kept = meta.rename(tmp_path / "kept")
    meta.symlink_to("/proc/self/mem")

    def pauses() -> Iterator[float]:
        yield 0.0
        meta.unlink()
        kept.rename(meta)
        yield 0.0

    saved = CheckpointStore(tmp_path, retry_s=Pauses(pauses)).newest_good()
    assert saved is not None
    assert saved.progress.step == 1


class Pauses(tuple[float, ...]):
    """Mends the disk between two tries."""

    def __new__(cls, made: Callable[[], Iterator[float]]) -> Pauses:
        return super().__new__(cls)

    def __init__(self, made: Callable[[], Iterator[float]]) -> None:
        self._made = made

    def __iter__(self) -> Iterator[float]:
        return self._made()


def test_when_all_are_damaged_nobody_begins_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest_good() is None
    for step in (10, 20):
        store.save(STATE, Progress(step=step), {})
        (tmp_path / "checkpoints" / f"step-{step:08d}" / STATE_FILE).write_bytes(b"torn")
    heard = []
    with pytest.raises(CheckpointError, match=r"step-00000020, step-00000010.*train from the beginning"):
        store.newest_good(lambda step, error: heard.append(step))
    assert heard == [20, 10]
    store.archive(10)
    store.archive(20)
    with pytest.raises(CheckpointError, match="damaged-step-00000010"):
        store.newest_good()
    shutil.rmtree(tmp_path / "checkpoints")
    assert store.newest_good() is None


def test_one_that_is_deleted_while_it_is_read_is_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=1), {})

    def read(folder: Path, files: Sequence[StateFile]) -> State:
        with StateFiles.on_disk(folder, files) as opened:
            shutil.rmtree(folder)
            return opened.read()

    assert same(store.load(1, read).state, STATE)
    assert store.steps() == []


@pytest.mark.parametrize("keep", [1, 3])
def test_the_same_step_again_is_lost_at_no_moment(tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename = CheckpointStore(tmp_path, keep), Path.rename
    store.save(STATE, Progress(step=1), {"seed": 1})

    class Killed(BaseException):
        pass

    def killed(path: Path, target: Path) -> None:
        if path.name.endswith(f"{os.getpid()}.tmp"):
            raise Killed
        rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        store.save(STATE, Progress(step=1), {"seed": 2})
    monkeypatch.undo()
    saved = store.newest_good()
    assert saved is not None
    assert saved.config == {"seed": 1}
    store.save(STATE, Progress(step=1), {"seed": 3})
    assert store.load(1).config == {"seed": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        store.save(STATE, Progress(step=step), {})
    (tmp_path / "step-00000020" / STATE_FILE).write_bytes(b"torn")
    store.newest_good(lambda step, error: store.archive(step))
    assert store.steps() == [10]
    store.save(STATE, Progress(step=15), {})
    store.save(STATE, Progress(step=18), {})
    assert store.steps() == [15, 18]
    assert (tmp_path / "damaged-step-00000020").is_dir()


def test_the_one_just_written_is_never_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(STATE, Progress(step=20), {})
    store.save(STATE, Progress(step=10), {})
    assert 10 in store.steps()


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=1), {})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.save(STATE, Progress(step=2), {})
    monkeypatch.undo()
    assert store.steps() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert store.newest_good() is not None


def test_leftovers_of_a_killed_process_go(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.99.tmp").mkdir()
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=2), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
