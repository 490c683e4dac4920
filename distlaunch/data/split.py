"""One split of the data, as global batches of row sources at any position of an endless sequence of passes.

A *pass* goes once through the training data. Its order depends on the seed and the number of the pass alone, so that
every process of a run sees the same global batches, and a resumed run continues where the old one stopped.
"""

from __future__ import annotations

import copy
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Index, Source, num_rows, pack, slice_rows
from distlaunch.data.running_fingerprint import RunningFingerprint

_ZERO = np.int64(0)


@dataclass(frozen=True)
class Batching:
    """Evidence that the elements of a pipeline are batches, although the config does not say so.

    Attributes:
        rows: leading dimension that all parts of the first element share.
        is_certain: the pipeline itself shows it; else only a model can that takes one dimension less.
        is_even: the next elements have the same leading dimension.
    """

    rows: int
    is_certain: bool
    is_even: bool


class Forms(Protocol):
    """The other forms of a split for training, each made when it is first asked for."""

    @functools.cached_property
    def unaugmented(self) -> Split | None:
        """The split without `data.augment`; None if that does not change it."""
        ...

    @functools.cached_property
    def in_order(self) -> Split:
        """The same examples as they are evaluated: unchanged, complete, and in their own order."""
        ...


class Split(ABC):
    """A split of the data, ready to be read.

    There is a class for each kind of data: `Indexed` (examples by number: arrays, items, files), `Pipeline`, `Streams`
    and `PyDatasets` (batches by number). Such a class sets the facts below and says how *row sources* are made and
    read. A row source stands for the rows of a global batch: a structure of tensors, each with one entry for each row
    in its first dimension, which can be cut into the rows of replicas before anything is read. What happens to examples
    after they have been read, and what is learnt of a split later, is added by `with_transform()` and the methods after
    it. Each returns another split of the same class, and leaves this one as it is.

    Attributes:
        num_examples: None if unknown.
        num_batches: global batches of one pass; None if unknown.
        empty: a row source without rows, which marks an end.
        global_batch: rows of a batch, but for the last one of a pass; None if unknown.
        name: `train` or `validation`.
        is_process_local: whether each process has its own examples, and a part of each batch; see
            `Source.is_process_local`.
        endless: the pipeline repeats for ever, so that a pass has no end.
        by_number: `pick()` finds any batch at once.
        is_numbered: batches are found by number although there is no end to them.
        reads_all: the name of what every process reads whole, and not its own rows alone; empty otherwise.
        notes: what is to be said about it at the start of a run.
        labels: those of all examples, where they are arrays that nothing changes.
        at_once, threads: see `Source`.
        work: what is done to each example, in words: `reading`, `map`, `augment`, several of them, or nothing.
        in_python: Python code of the user's reads the examples.
        has_glimpse: what processes read can be compared, by `glimpse()`.
        running: where it is compared.
    """

    num_examples: int | None
    num_batches: int | None
    empty: Any
    global_batch: int | None = None
    name: str = "train"
    is_process_local: bool = False
    endless: bool = False
    by_number: bool = False
    is_numbered: bool = False
    reads_all: str = ""
    notes: tuple[str, ...] = ()
    labels: Any = None
    at_once: int | None = None
    threads: int = 0
    work: str = ""
    in_python: bool = False
    has_glimpse: bool = False
    running: RunningFingerprint | None = None

    _transforms: tuple[Callable[[Batch], Batch], ...] = ()
    _num_raw: int = 0
    """Number of the transformations that come before the preprocessing."""
    _check: Callable[[Batch], Batch] | None = None
    _forms: Forms | None = None
    _only_types: bool = False

    # what a kind of data defines

    @abstractmethod
    def batches(self, number_of_pass: Index, start: Index) -> tf.data.Dataset:
        """Return the row sources of the global batches of a pass.

        Args:
            number_of_pass: an int64 scalar; in a graph, where it is a tensor without a value.
            start: an int64 scalar, the number of the first batch in the pass.
        """

    @abstractmethod
    def read(self, rows: Any, *, at_once: int = 1) -> Batch:
        """Return the examples of a row source, or of a slice of one, mapped: `(x, y)` or `(x, y, sample_weight)`.

        It runs in the input pipeline. An example that fails stops it with an error of TensorFlow's, which
        `data_errors_raised()` turns into a DataError with the name of the example.

        Args:
            at_once: so many calls are made at the same time, and share the threads.
        """

    @abstractmethod
    def sample(self, number: int) -> tf.data.Dataset:
        """Return a dataset of one row source with the first so many examples, or fewer if there are no more.

        They come as they are before any shuffle: to learn shapes, no buffer is filled. It is empty if there are none.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a JSON object with the types of the examples and some of them, for comparisons of processes.

        See `data/fingerprints.py`. It reads some examples, and may be slow: `describe()` keeps what it returns.
        """

    def pick(self, number_of_pass: int, index: int) -> np.ndarray:
        """Return the row source of a batch of a pass, at once; only where `by_number` is true."""
        raise NotImplementedError

    def batching(self) -> Batching | None:
        """Return what suggests that the elements are batches already; None where nothing does."""
        return None

    def buffer(self) -> tuple[int, int]:
        """Return how many examples a shuffle holds in this process, and their bytes."""
        return 0, 0

    def glimpse(self, rows: Any) -> Any:
        """Return the first row, the last one, and their number, for comparisons while reading; in a graph."""
        number = num_rows(rows)
        return [slice_rows(rows, at, at + 1) for at in (tf.zeros_like(number), number - 1)], number

    def forever(self) -> tf.data.Dataset | None:
        """Return row sources pass after pass, without ends; None where that is one whole pass after the other."""
        return None

    # what is added to it

    def with_transform(self, transform: Callable[[Batch], Batch]) -> Self:
        """Return the split, each batch of which goes through a transformation as a part of the data.

        Args:
            transform: in the input pipeline, so it gets tensors of any number of rows.
        """
        before, after = self._transforms[: self._num_raw], self._transforms[self._num_raw :]
        return self._with(_transforms=(*before, transform, *after), _num_raw=len(before) + 1)

    def with_preprocessing(self, preprocessing: Callable[[Batch], Batch]) -> Self:
        """Return the split, whose batches go through `data.preprocessing` last; see `load(raw=True)`."""
        return self._with(_transforms=(*self._transforms, preprocessing))

    def with_check(self, check: Callable[[Batch], Batch]) -> Self:
        """Return the split, whose batches are looked at last; in order, too.

        Args:
            check: see `Source.check`.
        """
        return self._with(_transforms=(*self._transforms, check), _check=check)

    def with_role(self, name: str, *, is_process_local: bool) -> Self:
        """Return the split with another `name` and `is_process_local`."""
        return self._with(name=name, is_process_local=is_process_local)

    def with_length(self, num_batches: int | None, num_examples: int | None) -> Self:
        """Return the split with a length that the processes have agreed upon; None: unknown."""
        return self._with(num_batches=num_batches, num_examples=num_examples)

    def with_forms(self, forms: Forms) -> Self:
        """Return the split as one for training that has other forms."""
        return self._with(_forms=forms)

    def with_running(self, running: RunningFingerprint) -> Self:
        """Return the split, which is compared with that of other processes while it is read."""
        return self._with(running=running)

    def of_others(self) -> Self:
        """Return the split as one that other processes read: of unknown length, and described by its types alone."""
        return self._with(num_batches=None, num_examples=None, _only_types=True)

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        changed.__dict__.update(changes)
        return changed

    # other forms

    @property
    def unaugmented(self) -> Split:
        """Return the split without `data.augment`, or this split if that does not change it."""
        return self if self._forms is None else self._forms.unaugmented or self

    def in_order(self) -> Split:
        """Return the same examples as they are evaluated: unchanged, in their own order and all of them."""
        if self._forms is None:
            return self
        split = self._forms.in_order
        return split if self._check is None else split.with_check(self._check)

    # reading

    def load(self, rows: Any, *, at_once: int = 1, raw: bool = False) -> Batch:
        """Return the batch of a row source; see `read()`.

        Args:
            raw: without the preprocessing.
        """
        batch = self.read(rows, at_once=at_once)
        for transform in self._transforms[: self._num_raw] if raw else self._transforms:
            batch = transform(batch)
        return batch

    def describe(self) -> str:
        """Return what processes compare to know that they see the same data; see `data/fingerprints.py`."""
        return json.dumps({"types": json.loads(self._fingerprint)["types"]}) if self._only_types else self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        return self.fingerprint()

    def training_source(
        self, first_pass: int, offset: int, *, ends_visible: bool, skip: int = 0, batches: int | None = None,
        passes: int | None = None,
    ) -> Source:  # fmt: skip
        """Return the endless sequence of training passes.

        Args:
            first_pass, offset: where to begin, the offset in batches.
            ends_visible: put an element without rows after each pass (needed where its length is not known).
            skip: batches to read and drop first, where only that leads to the position.
            batches, passes: how many the run will take at most; read-ahead begins no pass behind them. None: no end.
        """
        kept = []
        position = skip or offset
        if self.is_numbered:
            offset, skip = position, 0

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            start = tf.where(number == first_pass, tf.constant(offset, tf.int64), tf.constant(0, tf.int64))
            rows = self.batches(number, start)
            kept.append(rows if tf.executing_eagerly() else None)  # in debug mode it owns its functions
            if self.is_process_local:
                return self._own_pass(rows, start, self.num_batches, ends=ends_visible)
            return rows.concatenate(tf.data.Dataset.from_tensors(self.empty)) if ends_visible else rows

        # passes are counted within the pipeline, which so runs on from one to the next
        last = np.iinfo(np.int64).max if passes is None else first_pass + passes
        elements = tf.data.Dataset.range(first_pass, last).flat_map(one_pass)
        if self.num_batches is None and not ends_visible and (forever := self.forever()) is not None:
            elements = _with_rows(forever) if self.is_process_local else forever
        first = position if self.num_batches is None else first_pass * self.num_batches + offset
        elements = elements.skip(skip) if skip else elements
        if self.running is not None and self.has_glimpse:
            self.running.begin()
            elements = self.running.watched(elements, self.glimpse)
        if batches is not None:
            elements = elements.take(batches)
        if batches is not None or passes is not None:
            elements = elements.concatenate(self._ends())
        return self._source(elements, self.name, first, self.num_batches, ends=ends_visible)

    def evaluation_source(self, first: int | None = None) -> Source:
        """Return one pass in its own order, followed by endless elements without rows.

        Args:
            first: number of batches after which it ends, for a split that may be endless.
        """
        rows, number = self.batches(_ZERO, _ZERO), self.num_batches
        if first is not None:
            rows, number = rows.take(first), first
        elements = (self._own_pass(rows, _ZERO, number, ends=True) if self.is_process_local else rows).concatenate(
            self._ends()
        )
        return self._source(elements, f"{self.name}:once", 0, number, ends=number is None)

    def first_rows(self, rows: int, *, raw: bool = False) -> Batch:
        """Return the batch of the first few examples, not augmented; `raw`: before the preprocessing."""
        plain = self.unaugmented
        if plain is not self:
            self._check_augmented(plain)
            return plain.first_rows(rows, raw=raw)
        for element in self.sample(rows).take(1):
            return self.load(element, raw=raw)
        raise ConfigError(Problem(("data",), "the dataset is empty"))

    def _check_augmented(self, plain: Split) -> None:
        """Raise ConfigError if `data.augment` does not take an example, or makes one of another form of it."""
        augmented, given = _form(self), _form(plain)
        if augmented != given:
            message = f"it makes examples of the form {augmented} of examples of the form {given}"
            hint = "return as many values with as many dimensions; what changes their form belongs in `data.map`"
            raise ConfigError(Problem(("data", "augment"), f"{message}; {hint}"))

    def _source(
        self, elements: tf.data.Dataset, name: str, first: int, num_batches: int | None, *, ends: bool
    ) -> Source:
        ends = ends and not self.is_process_local  # those of one's own data are agreed upon with the rows of each batch
        # directly, where nothing is done afterwards: it spares AutoGraph the conversion of a function
        load = self.load if self._transforms else self.read
        return Source(
            elements, load, name, first, num_batches, ends, self.at_once, self.threads, self.describe,
            self.is_process_local, self.global_batch, self._check,
        )  # fmt: skip

    def _own_pass(self, rows: tf.data.Dataset, start: Index, num_batches: int | None, *, ends: bool
                  ) -> tf.data.Dataset:  # fmt: skip
        """Return a process-local pass, extended to the longest pass of all processes."""
        if num_batches is not None:
            return _with_rows(rows).concatenate(self._ends()).take(num_batches - start)
        return _with_rows(rows).concatenate(self._ends()) if ends else _with_rows(rows)

    def _ends(self) -> tf.data.Dataset:
        if not self.is_process_local:
            return tf.data.Dataset.from_tensors(self.empty).repeat()
        return self.sample(1).take(1).map(lambda *element: (pack(element), _ZERO)).repeat()


def _form(split: Split) -> str:
    """Return the structure of an example, with the number of dimensions of each value; empty if there is none."""
    for element in split.sample(1).take(1):
        batch = split.load(element, raw=True)
        shapes = tf.nest.map_structure(lambda leaf: f"{leaf.shape.rank - 1} dimensions", batch)
        return str(shapes).replace("'", "").replace("1 dimensions", "1 dimension")
    return ""


def _with_rows(elements: tf.data.Dataset) -> tf.data.Dataset:
    return elements.map(lambda *element: (pack(element), num_rows(pack(element))))
