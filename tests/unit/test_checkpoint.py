"""Checkpoints: atomic, checksummed, of any type, pruned."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from distlaunch.errors import CheckpointError
from distlaunch.training.checkpoint import CheckpointStore, DamagedError, Progress

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


@pytest.mark.parametrize("damage", ["flip", "truncate", "no meta", "torn meta", "flipped meta", "no state"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(STATE, Progress(step=step), {})
    state, meta = tmp_path / "step-00000002" / "state.npz", tmp_path / "step-00000002" / "meta.json"
    data = state.read_bytes()
    if damage == "flip":
        state.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
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


def test_one_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=1), {})

    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(hashlib, "file_digest", stale)
    with pytest.raises(CheckpointError, match="Stale file handle") as caught:
        store.load(1)
    assert not isinstance(caught.value, DamagedError)


def test_one_that_is_deleted_while_it_is_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, digest = CheckpointStore(tmp_path), hashlib.file_digest
    store.save(STATE, Progress(step=1), {})

    def deleting(*words: Any) -> Any:
        shutil.rmtree(tmp_path / "step-00000001")
        return digest(*words)

    monkeypatch.setattr(hashlib, "file_digest", deleting)
    assert store.load(1).state.keys() == STATE.keys()


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
    (tmp_path / "step-00000020" / "state.npz").write_bytes(b"torn")
    store.newest_good(lambda step, error: store.set_aside(step))
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
