"""Base of splits whose row sources and batches are NumPy arrays."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source, num_rows
from distlaunch.data.split import Split


class Elements:
    """Elements of a source, which can be read several times.

    Args:
        make: returns an iterator over the elements from the first one on.
    """

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class HostSplit(Split):
    """A split that is read without TensorFlow; see `Split`. Row sources are arrays."""

    on_host = True

    @abstractmethod
    def batches(self, number_of_pass: int, start: int) -> Iterable[Any]:
        """Return the row sources of the global batches of a pass, from batch `start` on."""

    @abstractmethod
    def sample(self, number: int) -> Any:
        """Return a row source of the first examples, at most `number`."""

    def identify_rows(self, rows: Any) -> Any:
        raise NotImplementedError

    def training_source(
        self, first_pass: int, offset: int, *, ends_visible: bool, skip: int = 0, batches: int | None = None,
        passes: int | None = None,
    ) -> Source:  # fmt: skip
        position = skip or offset
        if self.is_numbered:
            offset, skip = position, 0

        def each_pass() -> Iterator[Any]:
            numbers = itertools.count(first_pass) if passes is None else range(first_pass, first_pass + passes)
            for number in numbers:
                yield from self._one_pass(number, offset if number == first_pass else 0, ends=ends_visible)

        def elements() -> Iterator[Any]:
            wanted = itertools.islice(each_pass(), skip, None if batches is None else skip + batches)
            return self._then_ends(self._compared(wanted))

        if self.running_fingerprint is not None and self.can_compare_rows:
            self.running_fingerprint.begin()
        first = position if self.num_batches is None else first_pass * self.num_batches + offset
        return self._source(Elements(elements), self.name, first, self.num_batches, ends=ends_visible)

    def evaluation_source(self, first: int | None = None) -> Source:
        number = self.num_batches if first is None else first

        def elements() -> Iterator[Any]:
            rows = itertools.islice(self.batches(0, 0), first)
            if self.is_process_local:
                rows = itertools.islice(self._then_ends(_with_rows(rows)), number)
            return self._then_ends(rows)

        return self._source(Elements(elements), f"{self.name}:once", 0, number, ends=number is None)

    def batch_spec(self) -> Any:
        return None

    def first_rows(self, rows: int, *, raw: bool = False) -> Batch:
        sample = self.sample(rows)
        if not num_rows(sample):
            raise ConfigError(Problem(("data",), "the dataset is empty"))
        return self.load(sample, raw=raw)

    def _one_pass(self, number: int, start: int, *, ends: bool) -> Iterator[Any]:
        rows = self.batches(number, start)
        if not self.is_process_local:
            yield from rows
            if ends:
                yield self.empty
            return
        # elements without rows make the pass as long as the longest pass of all processes
        if self.num_batches is not None:
            yield from itertools.islice(self._then_ends(_with_rows(rows)), self.num_batches - start)
        elif ends:
            yield from self._then_ends(_with_rows(rows))
        else:
            yield from _with_rows(rows)

    def _compared(self, elements: Iterable[Any]) -> Iterator[Any]:
        """Yield the elements; each is added to the running fingerprint when it is read."""
        running = self.running_fingerprint if self.can_compare_rows else None
        for element in elements:
            if running is not None and num_rows(element):
                running.record(*self._identifying_arrays(element))
            yield element

    def _identifying_arrays(self, rows: Any) -> list[np.ndarray]:
        """Return arrays that identify the rows of a batch, for comparisons while reading."""
        raise NotImplementedError

    def _then_ends(self, elements: Iterable[Any]) -> Iterator[Any]:
        """Yield the elements, then endless elements without rows."""
        yield from elements
        yield from itertools.repeat((self.sample(1), np.int64(0)) if self.is_process_local else self.empty)


def _with_rows(elements: Iterable[Any]) -> Iterator[Any]:
    return ((rows, num_rows(rows)) for rows in elements)
