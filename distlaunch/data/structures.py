"""Nested structures of tuples, lists and mappings, and the types of their arrays, without any framework.

Structures are traversed as by `tf.nest`: mappings in the order of their sorted keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlaunch.patches.tensorflow_late import not_converted, tf


@dataclass(frozen=True)
class ArraySpec:
    """The type of an array.

    Attributes:
        shape: sizes, with None for a size that is not known; or None if even the number of dimensions is not known.
        dtype: name of the type, such as `float32`; `string` for text.
    """

    shape: tuple[int | None, ...] | None
    dtype: str

    @staticmethod
    def of(array: np.ndarray) -> ArraySpec:
        """Return the type of an array."""
        return ArraySpec(tuple(array.shape), "string" if array.dtype.kind in "OSU" else array.dtype.name)

    @staticmethod
    def of_tensors(spec: tf.TensorSpec) -> ArraySpec:
        """Return the type of tensors that a `tf.TensorSpec` describes."""
        shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
        return ArraySpec(shape, spec.dtype.name)

    def tensor_spec(self) -> tf.TensorSpec:
        """Return this type as a `tf.TensorSpec`."""
        shape: Any = self.shape
        return tf.TensorSpec(shape, tf.as_dtype(self.dtype))

    def is_compatible_with(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of this shape has this type."""
        if self.shape is None:
            return True
        same_rank = len(shape) == len(self.shape)
        return same_rank and all(mine in (None, size) for mine, size in zip(self.shape, shape, strict=True))

    def joined(self, shape: tuple[int, ...]) -> ArraySpec:
        """Return the type of arrays that have either the shape of this type or the given one."""
        if self.shape is None or len(shape) != len(self.shape):
            return ArraySpec(None, self.dtype)
        sizes = tuple(mine if mine == size else None for mine, size in zip(self.shape, shape, strict=True))
        return ArraySpec(sizes, self.dtype)


@not_converted
def flatten(structure: Any) -> list[Any]:
    """Return the leaves of a structure."""
    return list(_leaves(structure))


@not_converted
def map_structure(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Return a structure with the results of a function of the leaves; the other structures are like the first."""
    if isinstance(structure, Mapping):
        made = {name: map_structure(function, structure[name], *(other[name] for other in others))
                for name in sorted(structure)}  # fmt: skip
        return {name: made[name] for name in structure}
    if isinstance(structure, (tuple, list)):
        parts = [map_structure(function, *each) for each in zip(structure, *others, strict=True)]
        kind = type(structure)
        # a named tuple takes its parts as arguments
        return kind(parts) if kind in (tuple, list) else kind(*parts)
    return function(structure, *others)


@not_converted
def pack(structure: Any, leaves: list[Any]) -> Any:
    """Return a structure like the given one with other leaves, which come in the order of `flatten`."""
    rest = iter(leaves)
    return map_structure(lambda _: next(rest), structure)


def _leaves(structure: Any) -> Iterator[Any]:
    if isinstance(structure, Mapping):
        for name in sorted(structure):
            yield from _leaves(structure[name])
    elif isinstance(structure, (tuple, list)):
        for part in structure:
            yield from _leaves(part)
    else:
        yield structure
