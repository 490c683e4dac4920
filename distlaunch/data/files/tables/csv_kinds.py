"""Determines the types of the columns of CSV files from all values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from distlaunch.data.files.tables.base import Kind

_INT, _FLOAT, _STRING = range(3)
_NAMES = ("int64", "float32", "string")
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class Guess:
    """Narrowest type that fits the values of a column so far."""

    def __init__(self) -> None:
        self.rank = _INT
        self.missing = False

    def add(self, texts: Sequence[str]) -> None:
        """Update the type with more values."""
        if self.rank == _STRING:
            return
        filled = texts if all(texts) else [text for text in texts if text]
        self.missing |= len(filled) < len(texts)
        joined = "".join(filled)
        if "_" in joined or not joined.isascii():  # only Python would read such texts as numbers
            self.rank = _STRING
        if self.rank == _INT:
            self.rank = _rank_of_whole(filled)
        if self.rank == _FLOAT and not _are_floats(filled):
            self.rank = _STRING


def merge_guesses(guesses: Iterable[Guess]) -> Kind:
    """Return the kind of one column in all files.

    Integers with missing values become floats, for which missing values are NaN.
    """
    guesses = list(guesses)
    rank = max(guess.rank for guess in guesses)
    missing = any(guess.missing for guess in guesses)
    if rank == _INT and missing:
        rank = _FLOAT
    return Kind(_NAMES[rank], (), missing)


def _rank_of_whole(texts: Sequence[str]) -> int:
    try:
        # use `int`, since `int` also converts the values when they are read
        numbers = list(map(int, texts))
    except ValueError:
        return _FLOAT
    # identifiers with more than 64 bits stay strings, because floats would not distinguish them
    fits = not numbers or (min(numbers) >= _LOWEST and max(numbers) <= _HIGHEST)
    return _INT if fits else _STRING


def _are_floats(texts: Sequence[str]) -> bool:
    try:
        deque(map(float, texts), maxlen=0)
    except ValueError:
        return False
    return True
