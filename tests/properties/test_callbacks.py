"""The state of callbacks is restored in new callbacks of the same config."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow")

from distlaunch.base.run_dir import RunDir
from distlaunch.checkpoints.callback_state import (
    NOT_RESTORED,
    restore_state,
    stored_state,
)
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.config.run import Callback
from distlaunch.training.callbacks import build_callbacks
from tests.properties.drawn import texts
from tests.properties.test_checkpoints import arrays

CALLBACKS = (
    Callback(name="EarlyStopping", args={"patience": 2, "restore_best_weights": True}),
    Callback(name="ReduceLROnPlateau", args={"monitor": "loss"}),
    Callback(name="ModelCheckpoint", args={"filepath": "best.keras"}),
    Callback(name="TerminateOnNaN"),
    Callback(name="CSVLogger", args={"filename": "log.csv"}),
)
plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts
numbers = st.floats(width=32).map(np.float32) | st.integers(0, 9).map(np.int64)
held = plain | numbers | arrays() | st.lists(arrays(), min_size=1, max_size=12)


@given(st.data(), st.sampled_from(CALLBACKS))
def test_attributes_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, config: Callback) -> None:
    run = RunDir(tmp_path_factory.getbasetemp() / "callbacks")
    [trained] = build_callbacks([config], is_chief=True, run=run)
    own = [name for name in vars(trained) if not name.startswith("_") and name not in NOT_RESTORED]
    mine = [name for name in own if is_held(vars(trained)[name])]
    assume(mine)
    changed = data.draw(st.dictionaries(st.sampled_from(mine), held, max_size=4))
    for name, value in changed.items():
        setattr(trained, name, value)
    store = CheckpointStore(tmp_path_factory.getbasetemp() / "of callbacks")
    state, stored_arrays = stored_state(trained)
    store.save(stored_arrays, Progress(callbacks=[state]), {})
    saved = store.load(0)
    [resumed] = build_callbacks([config], is_chief=True, run=run)
    restore_state(resumed, saved.progress.callbacks[0], saved.state)
    for name, value in changed.items():
        assert exactly(vars(resumed)[name]) == exactly(value), name


def is_held(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def exactly(value: Any) -> Any:
    """Return the value with its type; a number of NumPy counts as a number of Python."""
    if isinstance(value, list):
        return [exactly(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return repr(value.item() if isinstance(value, np.generic) else value)
