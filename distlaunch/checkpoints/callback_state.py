"""The part of a Keras callback's state that checkpoints contain."""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Most values in a list, tuple, set or dict of a callback. They are in the text of each checkpoint."""
_TOO_LARGE = f"more than {_LARGEST:,} entries"
_ARRAY, _DICT, _MAXLEN, _OBJECT = "$array", "$dict", "$maxlen", "$object"
_KINDS: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": deque}
"""Collections that JSON does not have, by the key that marks them."""
_COLLECTIONS = (list, dict, *_KINDS.values())


@dataclass(frozen=True)
class _Packed:
    """The value of an attribute as JSON and arrays.

    Attributes:
        plain: numbers, strings, lists and dicts. An array is `{"$array": INDEX}`, a tuple `{"$tuple": [...]}`.
        arrays: the arrays themselves, not copies.
        unsupported: what checkpoints cannot hold, such as `values of the type Counter`; None if they can hold it.
    """

    plain: Any
    arrays: list[np.ndarray]
    unsupported: str | None


@dataclass(frozen=True)
class _Initial:
    """The value of an attribute in a new callback; arrays only as checksums, because they may be large."""

    plain: Any
    checksums: list[str]
    unsupported: str | None

    @property
    def is_complete(self) -> bool:
        """True if `plain` is the whole value."""
        return self.unsupported is None and not self.checksums

    def equals(self, packed: _Packed) -> bool:
        """Return True if an attribute has this value."""
        # compared by `repr`, because False == 0; first, because the checksums of large arrays take long
        return repr(self.plain) == repr(packed.plain) and self.checksums == list(map(_checksum, packed.arrays))


def remember_config(callback: keras.callbacks.Callback, place: int) -> None:
    """Remember the attributes of a new callback, before training changes them.

    Args:
        place: index of the callback in the config. The index in a task's list may differ, because only the chief has
            all callbacks.
    """
    vars(callback)["_distlaunch_place"] = place
    # distinguishes values from the config, which may have changed in a resumed run, from values changed by training
    vars(callback)["_distlaunch_made_with"] = {
        name: _Initial(packed.plain, list(map(_checksum, packed.arrays)), packed.unsupported)
        for name, packed in _packed_attributes(callback).items()
        if packed.unsupported != _TOO_LARGE
    }


def place_of(callback: keras.callbacks.Callback, default: int) -> int:
    """Return the index of a callback in the config."""
    return getattr(callback, "_distlaunch_place", default)


def stored_state(callback: keras.callbacks.Callback) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the values among a callback's attributes that a checkpoint holds: as JSON, and copies of the arrays.

    Of a class of Keras, these are the public numbers, strings, arrays and lists of arrays. Of a user's class, they
    include private attributes, and lists, tuples, sets, dicts and deques of such values.

    Returns:
        The arrays by name, and a dict with the name of the `class`; `monitor`: the value that the callback watches, or
        None; `changed`: values that training has changed, such as EarlyStopping's `wait` and `best`; `unchanged`: names
        of the other attributes, whose values come from the config of a resumed run; and `not_stored`: for collections
        and arrays that training has changed, and that a checkpoint cannot hold, the reason.
    """
    made_with = _made_with(callback)
    changed, unchanged, not_stored, arrays = {}, [], {}, {}
    for name, packed in _packed_attributes(callback).items():
        if name in made_with and made_with[name].equals(packed):
            unchanged.append(name)
        elif packed.unsupported is None:
            changed[name] = packed.plain
            arrays |= {f"{name}/{index}": array.copy() for index, array in enumerate(packed.arrays)}
        # not other objects, such as open files, which callbacks open again when training begins
        elif isinstance(vars(callback)[name], (*_COLLECTIONS, np.ndarray)):
            not_stored[name] = packed.unsupported
    state = {**_identity(callback), "changed": changed, "unchanged": unchanged, "not_stored": not_stored}
    return state, arrays


def _made_with(callback: keras.callbacks.Callback) -> dict[str, _Initial]:
    return getattr(callback, "_distlaunch_made_with", {})


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


def _packed_attributes(callback: keras.callbacks.Callback) -> dict[str, _Packed]:
    names_of_keras = _names_of_keras(type(callback))
    packed = {}
    for name, value in vars(callback).items():
        if name.startswith("_distlaunch"):
            continue
        if name in names_of_keras:
            if name.startswith("_") and name not in _RESTORED:
                continue  # such as the model
            parts = value if isinstance(value, (list, tuple)) and value else [value]
            if not _is_scalar(_python_number(value)) and not all(map(_can_be_kept, parts)):
                continue
        packed[name] = _pack(value)
    return packed


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


def _pack(value: Any) -> _Packed:
    arrays: list[np.ndarray] = []
    unsupported: list[str] = []

    def pack(value: Any) -> Any:
        if _is_scalar(scalar := _python_number(value)):
            return scalar
        if _can_be_kept(value):
            arrays.append(value)
            return {_ARRAY: len(arrays) - 1}
        kind = next((kind for kind in _COLLECTIONS if isinstance(value, kind)), None)
        # classes derived from these would come back as plain lists and dicts
        if type(value) not in _COLLECTIONS:
            unsupported.append(f"values of the type {type(value).__name__}")
        if kind is None:
            return {_OBJECT: id(value)}
        if len(value) > _LARGEST:
            unsupported.append(_TOO_LARGE)
            return {_OBJECT: id(value)}
        if kind is list:
            return [pack(part) for part in value]
        for mark, other in _KINDS.items():
            if kind is other:
                parts = [pack(part) for part in value]
                ordered = sorted(parts, key=repr) if kind in (set, frozenset) else parts
                return {mark: ordered, **({_MAXLEN: value.maxlen} if kind is deque else {})}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: pack(part) for key, part in value.items()}
        return {_DICT: [[pack(key), pack(part)] for key, part in value.items()]}

    return _Packed(pack(value), arrays, next(iter(unsupported), None))


def _unpack(plain: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return a new value; the inverse of `_pack`."""
    if isinstance(plain, list):
        return [_unpack(part, arrays) for part in plain]
    if not isinstance(plain, dict):
        return plain
    mark = next(iter(plain), "")
    if mark == _ARRAY:
        return arrays[str(plain[_ARRAY])]
    if mark == _DICT:
        return {_unpack(key, arrays): _unpack(part, arrays) for key, part in plain[_DICT]}
    if mark in _KINDS:
        options = {"maxlen": plain[_MAXLEN]} if _MAXLEN in plain else {}
        return _KINDS[mark]([_unpack(part, arrays) for part in plain[mark]], **options)
    return {key: _unpack(part, arrays) for key, part in plain.items()}


def _python_number(value: Any) -> Any:
    """Return a number of NumPy as one of Python; return other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _can_be_kept(value: Any) -> bool:
    """Return whether this is an array that files can contain: one without Python objects, and without named fields."""
    is_plain = type(value) in (np.ndarray, np.memmap)  # not a masked array, which would come back without its mask
    return is_plain and not value.dtype.hasobject and value.dtype.names is None


def _checksum(array: np.ndarray) -> str:
    flat = np.ascontiguousarray(array).reshape(-1)
    # the bytes themselves, since a copy of a large array would take its memory again
    content = hashlib.blake2b(flat.view(np.uint8).data if flat.nbytes else b"", digest_size=16).hexdigest()
    return f"{array.dtype.str}{array.shape}{content}"


def restore_state(
    callback: keras.callbacks.Callback, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Restore the values of `stored_state`.

    Attributes of Keras that no longer exist, and those that have another kind of value now, are not restored.

    Returns:
        The attributes that have their initial values because the checkpoint could not hold them, with the reason.
    """
    made_with, now = _made_with(callback), _packed_attributes(callback)
    unchanged = {name: made_with[name] for name in state["unchanged"] if name in made_with}
    initial = {name: value.plain for name, value in unchanged.items() if value.is_complete}
    for name, plain in {**initial, **state["changed"]}.items():
        # a class of the user's may set an attribute only during training
        is_new = name not in vars(callback) and name not in _names_of_keras(type(callback))
        is_same = name in now and now[name].unsupported is None and name not in NOT_RESTORED
        if is_same or is_new:
            own = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
            vars(callback)[name] = _unpack(plain, own)
    # not those that the callback has set again when training began
    set_again = {
        name
        for name, packed in now.items()
        if packed.unsupported != _TOO_LARGE and (name not in made_with or not made_with[name].equals(packed))
    }
    return {name: reason for name, reason in state["not_stored"].items() if name not in set_again}
