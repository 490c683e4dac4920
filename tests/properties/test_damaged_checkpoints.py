"""A checkpoint that is not as it was written is damaged, whatever was done to it, and an older one serves."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distlaunch.checkpoints.meta import Progress, checksum, read_meta
from distlaunch.checkpoints.store import CheckpointStore

STATE = {"model/a": np.arange(40, dtype=np.float32), "model/b": np.ones((3, 2), np.int64)}
CONFIG = {"name": "größe", "train": {"epochs": 3}}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "checkpoints", retry_s=())
    for step in (1, 2):
        history = {"loss": [0.5, float("nan")]}
        made.save({**STATE, "model/step": np.asarray(step)}, Progress(step=step, history=history), CONFIG)
    return made


def newest(store: CheckpointStore) -> int:
    """The step of the checkpoint that a resume begins with; the values of each are checked."""
    found = store.newest_good()
    assert found is not None
    assert int(found.state["model/step"]) == found.progress.step
    for name, value in STATE.items():
        np.testing.assert_array_equal(found.state[name], value)
    return found.progress.step


def corrupt(data: bytes, draw: random.Random) -> bytes:
    """Flip a bit, cut, repeat, or put other bytes in the place of some."""
    at = draw.randrange(len(data))
    kind = draw.randrange(5)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data + data[at:]
    if kind == 3:
        return data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at + 1 :]
    return data[:at] + b'{"a":' * draw.randrange(1, 20_000) + data[at:]


def check_corruptions(store: CheckpointStore, number: int) -> None:
    draw, folder = random.Random(7), store.directory / "step-00000002"
    for _ in range(number):
        path = folder / draw.choice(["meta.json", "state.safetensors"])
        before = path.read_bytes()
        after = corrupt(before, draw)
        if after == before:
            continue
        path.write_bytes(after)
        # what the checksums do not cover is the form of the text
        assert newest(store) == 1 or (path.name == "meta.json" and json.loads(after) == json.loads(before))
        path.write_bytes(before)
    assert newest(store) == 2


def test_random_corruptions(store: CheckpointStore) -> None:
    check_corruptions(store, 200)


@pytest.mark.slow
def test_many_random_corruptions(store: CheckpointStore) -> None:
    check_corruptions(store, 5_000)


def _forged(**changes: Any) -> Callable[[Path], None]:
    """Change the metadata, with a checksum that fits."""

    def forge(folder: Path) -> None:
        path = folder / "meta.json"
        meta = json.loads(path.read_bytes())
        meta.pop("meta_sha256")
        for key, value in changes.items():
            at = meta
            *parents, last = key.split("__")
            for part in parents:
                at = at[int(part)] if part.isdecimal() else at[part]
            at[last] = value
        path.write_text(json.dumps({**meta, "meta_sha256": checksum(meta)}))

    return forge


def _link(name: str, target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return link


def _pipe(name: str) -> Callable[[Path], None]:
    def pipe(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return pipe


def _folder(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


@pytest.mark.parametrize(
    "change",
    [
        _forged(progress__step="x"),
        _forged(progress__epoch=-1),
        _forged(progress__step=2.5),
        _forged(progress__history={"loss": ["high"]}),
        _forged(progress__callbacks="none"),
        _forged(progress__unknown=1),
        _forged(files__0__digests=None),
        _forged(files__0__name="/etc/passwd"),
        _forged(files__0__name="../step-00000001/state.safetensors"),
        _forged(files__0__num_bytes=-1),
        _forged(files="state.safetensors"),
        _forged(config=None),
        _link("meta.json", "/dev/zero"),
        _link("state.safetensors", "/dev/zero"),
        _link("state.safetensors", "state.safetensors"),
        _pipe("meta.json"),
        _pipe("state.safetensors"),
        _folder("meta.json"),
        _folder("state.safetensors"),
    ],
)
def test_what_is_forged_or_no_file_is_damage(store: CheckpointStore, change: Callable[[Path], None]) -> None:
    change(store.directory / "step-00000002")
    assert newest(store) == 1


def test_a_deep_text_is_no_metadata() -> None:
    assert read_meta(b'{"a":' * 200_000) is None
    assert read_meta(b"\xff\xfe") is None


def test_a_checkpoint_may_lie_behind_links_of_ones_own(store: CheckpointStore, tmp_path: Path) -> None:
    shutil.move(store.directory / "step-00000002", tmp_path / "elsewhere")
    (store.directory / "step-00000002").symlink_to(tmp_path / "elsewhere")
    assert newest(store) == 2
