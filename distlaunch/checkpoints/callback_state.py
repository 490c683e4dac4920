"""The part of a Keras callback's state that checkpoints contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

NOT_RESTORED = ("min_delta", "append_header")
"""Attributes that are not restored.

Keras changes the sign of `min_delta` at a callback's first comparison, and would change a restored value again.
CSVLogger checks its file for a header when training begins.
"""


_RESTORED = ("_ema_weights_in_model", "_batches_seen_since_last_saving", "_last_batch_seen")
"""Private attributes of SwapEMAWeights and ModelCheckpoint that are restored."""


def remember_config(callback: keras.callbacks.Callback, place: int) -> None:
    """Remember the attributes of a new callback, before training changes them.

    Args:
        place: index of the callback in the config. The index in a task's list may differ, because only the chief has
            all callbacks.
    """
    vars(callback)["_distlaunch_place"] = place
    # distinguishes values from the config, which may have changed in a resumed run, from values changed by training
    vars(callback)["_distlaunch_made_with"] = _plain(callback)


def place_of(callback: keras.callbacks.Callback, default: int) -> int:
    """Return the index of a callback in the config."""
    return getattr(callback, "_distlaunch_place", default)


def plain_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the numbers and strings among a callback's attributes, for a checkpoint.

    Returns:
        A dict with the name of the `class`; `changed`: values that training has changed, such as EarlyStopping's `wait`
        and `best`; and `unchanged`: names of the other attributes, whose values come from the config of a resumed run.
    """
    made_with, now = getattr(callback, "_distlaunch_made_with", {}), _plain(callback)
    # compared by `repr`, because False == 0
    unchanged = [name for name, value in now.items() if name in made_with and repr(made_with[name]) == repr(value)]
    changed = {name: value for name, value in now.items() if name not in unchanged}
    return {"class": type(callback).__name__, "changed": changed, "unchanged": unchanged}


def _plain(callback: keras.callbacks.Callback) -> dict[str, Any]:
    state = {}
    for name, value in vars(callback).items():
        plain = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
        # private attributes, such as the model, belong to Keras
        if (not name.startswith("_") or name in _RESTORED) and (
            plain is None or isinstance(plain, (bool, int, float, str))
        ):
            state[name] = plain
    return state


def array_state(callback: keras.callbacks.Callback) -> dict[str, np.ndarray]:
    """Return copies of a callback's attributes that are arrays, or lists of them (EarlyStopping's `best_weights`)."""
    state = {}
    for name, value in vars(callback).items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if not name.startswith("_") and parts and all(map(_can_be_kept, parts)):
            is_list = isinstance(value, (list, tuple))
            state.update({f"{name}/{index}" if is_list else name: part.copy() for index, part in enumerate(parts)})
    return state


def _can_be_kept(value: Any) -> bool:
    """Return whether this is an array that files can contain: one without Python objects, and without named fields."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None


def restore_arrays(callback: keras.callbacks.Callback, state: Mapping[str, np.ndarray]) -> None:
    """Restore the arrays that `array_state` has returned."""
    lists: dict[str, list[np.ndarray]] = {}
    for name, value in state.items():
        # a / marks an array of a list, since attribute names do not contain it
        attribute, is_part, _ = name.partition("/")
        if is_part:
            lists.setdefault(attribute, []).append(value)
        else:
            setattr(callback, attribute, value)
    for attribute, values in lists.items():
        setattr(callback, attribute, values)


def restore_state(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Restore the values of `plain_state`, except attributes that no longer exist or have another kind of value."""
    made_with = getattr(callback, "_distlaunch_made_with", {})
    found = {name: made_with[name] for name in state["unchanged"] if name in made_with} | state["changed"]
    now = _plain(callback)
    for name, value in found.items():
        if name in now and name not in NOT_RESTORED:
            setattr(callback, name, value)
