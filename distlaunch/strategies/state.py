"""State of a program as host arrays, whole or in shards; imports no framework."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Logs = dict[str, float]
"""Values of a step or an epoch by name, such as the loss."""
State = dict[str, np.ndarray]
"""Values of variables by name."""


class StateMismatchError(ValueError):
    """A snapshot does not fit the model: a variable is missing or has another shape."""


@dataclass(frozen=True)
class ShardSlice:
    """The position of a shard, which is a separate array, in its variable.

    Attributes:
        of: the variable's name.
        shape: shape of the whole variable.
        start: index of the shard's first element in each dimension.
    """

    of: str
    shape: tuple[int, ...]
    start: tuple[int, ...]

    def within(self, shard: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of the variable that a shard of this shape covers."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, shard, strict=True))
