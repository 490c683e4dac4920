"""A checkpoint restores any state: values, types, shapes and names of arrays, the progress, and callbacks' state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from distlaunch.checkpoints.meta import Progress, meta_text, read_meta
from distlaunch.checkpoints.store import CheckpointStore
from tests.properties.drawn import texts

FOREIGN = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4", "int2")
"""Types that NumPy does not have itself."""

names = texts | st.sampled_from(["names", "0", "__dtypes__", "a/b.npy", "../a", "é" * 300])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Draw an array of any type that a variable may have, often as a view that is not contiguous."""
    shape = draw(arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    foreign = draw(st.none() | st.sampled_from(FOREIGN))
    if foreign is not None:
        small = draw(arrays_of.arrays(np.int8, shape, elements=st.integers(0, 1)))
        whole = small.astype(getattr(ml_dtypes, foreign))
    else:
        kinds = (
            arrays_of.boolean_dtypes() | arrays_of.integer_dtypes() | arrays_of.unsigned_integer_dtypes()
            | arrays_of.floating_dtypes() | arrays_of.complex_number_dtypes()
            | arrays_of.byte_string_dtypes(max_len=4) | arrays_of.unicode_string_dtypes(max_len=4)
        )  # fmt: skip
        whole = draw(arrays_of.arrays(draw(kinds), shape))
    how = draw(st.sampled_from(["as it is", "transposed", "every second", "backwards"]))
    if whole.ndim == 0 or how == "as it is":
        return whole
    return {"transposed": whole.T, "every second": whole[::2], "backwards": whole[::-1]}[how]


states = st.dictionaries(names, arrays(), max_size=4)


def exactly(array: np.ndarray) -> tuple[Any, ...]:
    """Everything about an array; NaN equals itself bit by bit."""
    return array.dtype, array.shape, np.require(array, requirements="C").tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@given(states, st.integers(0, 2**40))
def test_arrays_come_back(folder: Path, state: dict[str, np.ndarray], step: int) -> None:
    shutil.rmtree(folder)
    store = CheckpointStore(folder)
    store.save(state, Progress(step=step), {})
    found = store.load(step).state
    assert list(found) == list(state)
    assert {name: exactly(array) for name, array in found.items()} == {
        name: exactly(array) for name, array in state.items()
    }


big = st.integers(-(2**70), 2**70)
values = st.none() | st.booleans() | big | st.floats() | texts
logs = st.dictionaries(texts, st.floats(), max_size=3)
progresses = st.builds(
    Progress,
    step=st.integers(0, 2**63),
    epoch=st.integers(0, 2**31),
    step_in_epoch=st.integers(0, 2**63),
    history=st.dictionaries(texts, st.lists(st.floats(), max_size=4), max_size=3),
    callbacks=st.lists(
        st.fixed_dictionaries(
            {
                "class": texts,
                "changed": st.dictionaries(texts, values, max_size=3),
                "unchanged": st.lists(texts, max_size=3),
                "monitor": st.none() | texts,
                "too_large": st.lists(texts, max_size=1),
            }
        ),
        max_size=2,
    ),
    finished=st.booleans(),
    stop_training=st.booleans(),
    pending_logs=st.none() | logs,
)


@given(progresses)
def test_progress_comes_back(progress: Progress) -> None:
    meta = read_meta(meta_text([], 1.0, progress, {}).encode())
    assert meta is not None
    assert repr(meta.progress) == repr(progress)
