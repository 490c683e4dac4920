"""The part of a Keras callback's state that checkpoints contain."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import keras
import numpy as np

NOT_RESTORED = ("min_delta", "append_header")
"""Attributes that are not restored.

Keras changes the sign of `min_delta` at a callback's first comparison, and would change a restored value again.
CSVLogger checks its file for a header when training begins.
"""


_RESTORED = (
    "_batches_seen_since_last_saving",
    "_ema_weights_in_model",
    "_global_test_batch",
    "_global_train_batch",
    "_last_batch_seen",
)
"""Private attributes of ModelCheckpoint, SwapEMAWeights and TensorBoard that are restored."""
_LARGEST = 10_000
"""Most values in a list or dict of a callback. They are in the text of each checkpoint."""
_NOT_PLAIN = object()


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

    Of a user's class, this includes private attributes, and lists and dicts of such values.

    Returns:
        A dict with the name of the `class`; `monitor`: the value that the callback watches, or None; `changed`: values
        that training has changed, such as EarlyStopping's `wait` and `best`; `unchanged`: names of the other
        attributes, whose values come from the config of a resumed run; and `too_large`: names of lists and dicts that
        are left out.
    """
    made_with, now = getattr(callback, "_distlaunch_made_with", {}), _plain(callback)
    # compared by `repr`, because False == 0
    unchanged = [name for name, value in now.items() if name in made_with and repr(made_with[name]) == repr(value)]
    changed = {name: value for name, value in now.items() if name not in unchanged}
    too_large = [
        name
        for name, value in vars(callback).items()
        if name not in now and isinstance(value, (list, dict)) and len(value) > _LARGEST
    ]
    return {**_identity(callback), "changed": changed, "unchanged": unchanged, "too_large": too_large}


def _identity(callback: keras.callbacks.Callback) -> dict[str, Any]:
    monitor = getattr(callback, "monitor", None)
    return {"class": type(callback).__name__, "monitor": monitor if isinstance(monitor, str) else None}


def stored_places(callbacks: Sequence[keras.callbacks.Callback], stored: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each callback the index of its stored state; -1 if it has none.

    A callback has the state of its own place, if that is the state of a callback of its class that watches the same
    value. Otherwise, it has the first such state that no other callback has, because the config may list others before
    it now.
    """
    wanted = [_identity(callback) for callback in callbacks]
    found = [{name: state[name] for name in ("class", "monitor")} for state in stored]
    own = [place_of(callback, index) for index, callback in enumerate(callbacks)]
    places = [place if place < len(found) and found[place] == wanted[index] else -1 for index, place in enumerate(own)]
    for index in [index for index, place in enumerate(places) if place < 0]:
        free = (place for place, one in enumerate(found) if one == wanted[index] and place not in places)
        places[index] = next(free, -1)
    return places


def _plain(callback: keras.callbacks.Callback) -> dict[str, Any]:
    state = {}
    for name, value in vars(callback).items():
        if name.startswith("_distlaunch"):
            continue
        if name not in _names_of_keras(type(callback)):
            plain = _plain_value(value)
        elif name.startswith("_") and name not in _RESTORED:
            continue  # such as the model
        else:
            plain = _plain_scalar(value)
        if plain is not _NOT_PLAIN:
            state[name] = plain
    return state


@functools.cache
def _names_of_keras(cls: type) -> frozenset[str]:
    """Return the names of attributes that Keras's own classes use, among the bases of a callback's class."""
    methods = [
        method
        for base in cls.__mro__
        if base.__module__.startswith("keras.")
        for method in vars(base).values()
        if isinstance(method, FunctionType)
    ]
    return frozenset().union(*(method.__code__.co_names for method in methods))


def _plain_scalar(value: Any) -> Any:
    plain = value.item() if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 else value
    return plain if plain is None or isinstance(plain, (bool, int, float, str)) else _NOT_PLAIN


def _plain_value(value: Any) -> Any:
    """Return a copy of a value of numbers, strings, lists and dicts; `_NOT_PLAIN` if it has others or is too large."""
    if type(value) not in (list, dict):  # classes derived from these would come back as plain lists and dicts
        return _plain_scalar(value)
    if len(value) > _LARGEST or not all(isinstance(name, str) for name in value if isinstance(value, dict)):
        return _NOT_PLAIN
    parts = [_plain_value(part) for part in (value.values() if isinstance(value, dict) else value)]
    if any(part is _NOT_PLAIN for part in parts):
        return _NOT_PLAIN
    return dict(zip(value, parts, strict=True)) if isinstance(value, dict) else parts


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
    """Restore the values of `plain_state`.

    Attributes of Keras that no longer exist, and those that have another kind of value now, are not restored.
    """
    made_with = getattr(callback, "_distlaunch_made_with", {})
    found = {name: made_with[name] for name in state["unchanged"] if name in made_with} | state["changed"]
    now = _plain(callback)
    for name, value in found.items():
        # a class of the user's may set an attribute only during training
        is_new = name not in vars(callback) and name not in _names_of_keras(type(callback))
        if (name in now and name not in NOT_RESTORED) or is_new:
            vars(callback)[name] = copy.deepcopy(value)
