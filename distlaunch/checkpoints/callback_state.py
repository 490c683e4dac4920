"""The part of a Keras callback's state that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

NOT_RESTORED = ("min_delta", "append_header")
"""Keras turns the sign of `min_delta` when a callback first compares, and would turn it once more; and CSVLogger looks
into its file for a header when training begins."""


_RESTORED = ("_ema_weights_in_model", "_batches_seen_since_last_saving", "_last_batch_seen")
"""Private state of Keras's callbacks: SwapEMAWeights swaps, ModelCheckpoint counts steps."""


def remember_config(callback: keras.callbacks.Callback, place: int) -> None:
    """Remember how a callback was made, before training changes it.

    Args:
        place: its place among the config's callbacks. The chief has callbacks that other tasks do not have, so
            positions in their lists differ.
    """
    callback._distlaunch_place = place
    # distinguishes what the config says from what training has changed: a resumed run may have another config
    callback._distlaunch_made_with = _plain(callback)


def place_of(callback: keras.callbacks.Callback, default: int) -> int:
    """Return the callback's place in the config: not every task has all of them."""
    return getattr(callback, "_distlaunch_place", default)


def plain_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the plain numbers and strings among a callback's attributes, as a checkpoint keeps them.

    Returns:
        `class`; `changed`: values that are not those it was made with, such as EarlyStopping's `wait` and `best`;
        `unchanged`: names of the others. Their values are the config's to say, also when a run goes on with another.
    """
    made_with, now = getattr(callback, "_distlaunch_made_with", {}), _plain(callback)
    # repr: False is not the 0 that it was made with
    unchanged = [name for name, value in now.items() if name in made_with and repr(made_with[name]) == repr(value)]
    changed = {name: value for name, value in now.items() if name not in unchanged}
    return {"class": type(callback).__name__, "changed": changed, "unchanged": unchanged}


def _plain(callback: keras.callbacks.Callback) -> dict[str, Any]:
    state = {}
    for name, value in vars(callback).items():
        plain = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
        # names with _ are Keras's own, such as the model
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
    """Return True for an array of plain numbers or texts; no file has those of Python objects or records."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None


def restore_arrays(callback: keras.callbacks.Callback, state: Mapping[str, np.ndarray]) -> None:
    """Put back what `array_state` has returned."""
    lists: dict[str, list[np.ndarray]] = {}
    for name, value in state.items():
        # an attribute's name has no /, so it marks a list
        attribute, is_part, _ = name.partition("/")
        if is_part:
            lists.setdefault(attribute, []).append(value)
        else:
            setattr(callback, attribute, value)
    for attribute, values in lists.items():
        setattr(callback, attribute, values)


def restore_state(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Put back what `plain_state` has returned, except attributes that are gone, or are no number now."""
    made_with = getattr(callback, "_distlaunch_made_with", {})
    found = {name: made_with[name] for name in state["unchanged"] if name in made_with} | state["changed"]
    now = _plain(callback)
    for name, value in found.items():
        if name in now and name not in NOT_RESTORED:
            setattr(callback, name, value)
