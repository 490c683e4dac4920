"""A split of the data, which can be read at any position of an endless sequence of passes.

A *pass* goes once through the training data. Its order depends only on the seed and the number of the pass. So every
process of a run reads the same global batches, and a resumed run continues where the previous attempt stopped.
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

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Index, Source, num_rows, pack, slice_rows
from distlaunch.data.running_fingerprint import RunningFingerprint
from distlaunch.data.structures import ArraySpec, flatten, map_structure
from distlaunch.patches.tensorflow_late import tf

_ZERO = np.int64(0)


@dataclass(frozen=True)
class Batching:
    """Evidence that the elements of a pipeline are batches, although the config does not say so.

    Attributes:
        rows: first dimension of all parts of the first element.
        is_certain: whether the pipeline alone proves that its elements are batches. If false, the elements count as
            batches only if the model's inputs have one dimension less.
        is_even: whether the next elements have the same first dimension.
    """

    rows: int
    is_certain: bool
    is_even: bool


class Forms(Protocol):
    """Other forms of a split for training, each made on first use."""

    @functools.cached_property
    def unaugmented(self) -> Split | None:
        """The split without `data.augment`; None if there is no such function."""
        ...

    @functools.cached_property
    def in_order(self) -> Split:
        """The same examples for evaluation: unchanged, complete and in the data's order."""
        ...


class Split(ABC):
    """A split of the data, ready to be read.

    There is a class for each kind of data: `Indexed` (examples by number: arrays, items, files), `Pipeline`, `Streams`
    and `PyDatasets` (batches by number). Such a class sets the attributes below, and defines how *row sources* are made
    and read. A row source represents the rows of a global batch. It is a structure of tensors whose first dimension
    counts the rows, so it can be sliced into the rows of replicas before any example is read. `with_transform()` and
    the methods after it return changed copies of a split, for instance with further processing of batches.

    Attributes:
        num_examples: number of examples; None if unknown.
        num_batches: number of global batches in a pass; None if unknown.
        empty: a row source without rows, which marks an end.
        global_batch: rows of a global batch, except the last one of a pass; None if unknown.
        name: `train` or `validation`.
        is_process_local: whether each process has its own examples, and a part of each batch; see
            `Source.is_process_local`.
        endless: whether a pass has no end.
        by_number: whether `pick()` finds any batch directly.
        is_numbered: whether the data is endless, and its batches are read by number.
        reads_all: the data's name in messages if every process reads whole batches instead of its rows, or "".
        notes: messages for the user at the start of a run.
        labels: the labels of all examples, if they are arrays that no function changes.
        at_once, threads: see `Source`.
        work: processing of each example, in words: `reading`, `map`, `augment`, several of them, or "".
        in_python: whether Python code of the user reads the examples.
        can_compare_rows: whether the rows that processes read can be compared, by `identify_rows()`.
        on_host: whether row sources and batches are NumPy arrays; see `on_host/split.py`.
        running_fingerprint: compares the rows that processes read; None if they are not compared.
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
    can_compare_rows: bool = False
    on_host: bool = False
    running_fingerprint: RunningFingerprint | None = None

    _transforms: tuple[Callable[[Batch], Batch], ...] = ()
    _num_before_preprocessing: int = 0
    """Number of the transformations that come before the preprocessing."""
    _check: Callable[[Batch], Batch] | None = None
    _forms: Forms | None = None
    _only_types: bool = False

    # what a kind of data defines

    @abstractmethod
    def batches(self, number_of_pass: Index, start: Index) -> Any:
        """Return a `tf.data.Dataset` with the row sources of the global batches of a pass.

        Args:
            number_of_pass: an int64 scalar; in a graph, its value is unknown.
            start: an int64 scalar, the index of the first batch within the pass.
        """

    @abstractmethod
    def read(self, rows: Any, *, at_once: int = 1) -> Batch:
        """Read and map the examples of a row source or of a slice, and return `(x, y)` or `(x, y, sample_weight)`.

        This runs in the input pipeline. If an example fails, TensorFlow raises an error, which `data_errors_raised()`
        replaces by a DataError with the name of the example.

        Args:
            at_once: number of calls that run at the same time and share the threads.
        """

    @abstractmethod
    def sample(self, number: int) -> Any:
        """Return a dataset with one row source of the first examples, at most `number`; empty if there are none.

        The examples are not shuffled, so no shuffle buffer needs to be filled.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a JSON object with the examples' types and hashes of some examples, to compare processes.

        See `data/fingerprints.py`. This reads some examples and may be slow, so `describe()` caches the result.
        """

    def pick(self, number_of_pass: int, index: int) -> np.ndarray:
        """Return the row source of a batch of a pass directly; available if `by_number` is true."""
        raise NotImplementedError

    def batching(self) -> Batching | None:
        """Return evidence that the elements are batches already, or None."""
        return None

    def is_found_empty(self) -> bool:
        """Return whether data of unknown length turns out to be empty when the first examples are read."""
        return False

    def rows_of_own_batches(self) -> int | None:
        """Return the number of rows of the batches that the user's pipeline makes; None if it varies or is unknown."""
        return None

    def buffer(self) -> tuple[int, int]:
        """Return the number of examples in this process's shuffle buffer, and their bytes."""
        return 0, 0

    def identify_rows(self, rows: Any) -> Any:
        """Return the first and the last row and the number of rows, in a graph, for comparisons while reading."""
        number = num_rows(rows)
        return [slice_rows(rows, at, at + 1) for at in (tf.zeros_like(number), number - 1)], number

    def endless_batches(self) -> tf.data.Dataset | None:
        """Return row sources of pass after pass without marks of ends, or None to concatenate whole passes."""
        return None

    # copies with additions

    def with_transform(self, transform: Callable[[Batch], Batch]) -> Self:
        """Return the split with a transformation of each batch, before the preprocessing.

        Args:
            transform: function of a batch with any number of rows, which runs in the input pipeline.
        """
        before, after = (
            self._transforms[: self._num_before_preprocessing],
            self._transforms[self._num_before_preprocessing :],
        )
        return self._with(_transforms=(*before, transform, *after), _num_before_preprocessing=len(before) + 1)

    def with_preprocessing(self, preprocessing: Callable[[Batch], Batch]) -> Self:
        """Return the split with `data.preprocessing` applied to each batch."""
        return self._with(_transforms=(*self._transforms, preprocessing))

    def with_check(self, check: Callable[[Batch], Batch]) -> Self:
        """Return the split with a check of each batch after the transformations so far; `in_order()` keeps the check.

        Args:
            check: see `Source.check`.
        """
        return self._with(_transforms=(*self._transforms, check), _check=check)

    def with_role(self, name: str, *, is_process_local: bool) -> Self:
        """Return the split with another `name` and `is_process_local`."""
        return self._with(name=name, is_process_local=is_process_local)

    def with_length(self, num_batches: int | None, num_examples: int | None) -> Self:
        """Return the split with the length that the processes have agreed on. None stands for an unknown length."""
        return self._with(num_batches=num_batches, num_examples=num_examples)

    def with_forms(self, forms: Forms) -> Self:
        """Return the split with these forms, for `unaugmented` and `in_order()`."""
        return self._with(_forms=forms)

    def with_running_fingerprint(self, running: RunningFingerprint) -> Self:
        """Return the split with a comparison between processes while they read it."""
        return self._with(running_fingerprint=running)

    def for_coordinator(self) -> Self:
        """Return the split for a coordinator whose workers read other data: without length, described only by types."""
        return self._with(num_batches=None, num_examples=None, _only_types=True)

    def _with(self, **changes: Any) -> Self:
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    # other forms

    @property
    def unaugmented(self) -> Split:
        """Return the split without `data.augment`, or this split if there is no such function."""
        return self if self._forms is None else self._forms.unaugmented or self

    def in_order(self) -> Split:
        """Return the same examples for evaluation: unchanged, complete and in the data's order."""
        if self._forms is None:
            return self
        split = self._forms.in_order
        return split if self._check is None else split.with_check(self._check)

    # reading

    def load(self, rows: Any, *, at_once: int = 1, raw: bool = False) -> Batch:
        """Return the batch of a row source; see `read()`.

        Args:
            raw: whether to omit the preprocessing.
        """
        batch = self.read(rows, at_once=at_once)
        for transform in self._transforms[: self._num_before_preprocessing] if raw else self._transforms:
            batch = transform(batch)
        return batch

    def batch_spec(self) -> Any:
        """Return an `ArraySpec` for each array of a batch. Sizes that may differ between batches are None.

        Return None if the types are unknown before reading, or if there are ragged or sparse tensors.
        """
        spec = self.batches(_ZERO, _ZERO).map(lambda *rows: self.load(pack(rows))).element_spec
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in flatten(spec)):
            return None
        return map_structure(ArraySpec.of_tensors, spec)

    def describe(self) -> str:
        """Return the description by which processes check that they read the same data; see `data/fingerprints.py`."""
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
            first_pass: index of the pass to begin with.
            offset: index of the batch in that pass to begin with.
            ends_visible: whether to add an element without rows after each pass, for passes of unknown length.
            skip: number of batches to read and drop first, if the position cannot be reached otherwise.
            batches: number of batches that the run will read at most; None for no limit. Reading ahead stops there.
            passes: the same limit in passes.
        """
        kept = []
        position = skip or offset
        if self.is_numbered:
            offset, skip = position, 0

        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            start = tf.where(number == first_pass, tf.constant(offset, tf.int64), tf.constant(0, tf.int64))
            rows = self.batches(number, start)
            kept.append(rows if tf.executing_eagerly() else None)  # in debug mode, the dataset must stay alive
            if self.is_process_local:
                return self._process_local_pass(rows, start, self.num_batches, ends=ends_visible)
            return rows.concatenate(tf.data.Dataset.from_tensors(self.empty)) if ends_visible else rows

        # passes are counted within the pipeline, so that it continues from one to the next without a pause
        last = np.iinfo(np.int64).max if passes is None else first_pass + passes
        elements = tf.data.Dataset.range(first_pass, last).flat_map(one_pass)
        if self.num_batches is None and not ends_visible and (endless_batches := self.endless_batches()) is not None:
            elements = _with_rows(endless_batches) if self.is_process_local else endless_batches
        first = position if self.num_batches is None else first_pass * self.num_batches + offset
        elements = elements.skip(skip) if skip else elements
        if self.running_fingerprint is not None and self.can_compare_rows:
            self.running_fingerprint.begin()
            elements = self.running_fingerprint.record_reads(elements, self.identify_rows)
        if batches is not None:
            elements = elements.take(batches)
        if batches is not None or passes is not None:
            elements = elements.concatenate(self._end_markers())
        return self._source(elements, self.name, first, self.num_batches, ends=ends_visible)

    def evaluation_source(self, first: int | None = None) -> Source:
        """Return one pass in the data's order, followed by endless elements without rows.

        Args:
            first: number of batches to read, for a split that may be endless; None for all.
        """
        rows, number = self.batches(_ZERO, _ZERO), self.num_batches
        if first is not None:
            rows, number = rows.take(first), first
        elements = (
            self._process_local_pass(rows, _ZERO, number, ends=True) if self.is_process_local else rows
        ).concatenate(self._end_markers())
        return self._source(elements, f"{self.name}:once", 0, number, ends=number is None)

    def first_rows(self, rows: int, *, raw: bool = False) -> Batch:
        """Return a batch of the first few examples, without `data.augment`.

        Args:
            raw: whether to omit the preprocessing.
        """
        plain = self.unaugmented
        if plain is not self:
            self._check_augmented(plain)
            return plain.first_rows(rows, raw=raw)
        for element in self.sample(rows).take(1):
            return self.load(element, raw=raw)
        raise ConfigError(Problem(("data",), "the dataset is empty"))

    def _check_augmented(self, plain: Split) -> None:
        """Raise ConfigError if `data.augment` fails for an example, or changes its structure or dimensions."""
        augmented, given = _form(self), _form(plain)
        if augmented != given:
            message = f"it turns examples of the form {given} into examples of the form {augmented}"
            hint = "return the same number of values and dimensions; use `data.map` to change the form of examples"
            raise ConfigError(Problem(("data", "augment"), f"{message}; {hint}"))

    def _source(self, elements: Any, name: str, first: int, num_batches: int | None, *, ends: bool) -> Source:
        ends = ends and not self.is_process_local  # the row counts of each batch show the ends of process-local data
        # `read` itself if possible, so that AutoGraph has one function less to convert
        load = self.load if self._transforms else self.read
        return Source(
            elements, load, name, first, num_batches, ends, self.at_once, self.threads, self.describe,
            self.is_process_local, self.global_batch, self._check, on_host=self.on_host,
        )  # fmt: skip

    def _process_local_pass(self, rows: tf.data.Dataset, start: Index, num_batches: int | None, *, ends: bool
                  ) -> tf.data.Dataset:  # fmt: skip
        """Return a process-local pass; elements without rows make it as long as the longest pass of all processes."""
        if num_batches is not None:
            return _with_rows(rows).concatenate(self._end_markers()).take(num_batches - start)
        return _with_rows(rows).concatenate(self._end_markers()) if ends else _with_rows(rows)

    def _end_markers(self) -> tf.data.Dataset:
        if not self.is_process_local:
            return tf.data.Dataset.from_tensors(self.empty).repeat()
        return self.sample(1).take(1).map(lambda *element: (pack(element), _ZERO)).repeat()


def _form(split: Split) -> str:
    """Return the structure of an example with the number of dimensions of each value; empty without examples."""
    for element in split.sample(1).take(1):
        batch = split.load(element, raw=True)
        shapes = tf.nest.map_structure(lambda leaf: f"{leaf.shape.rank - 1} dimensions", batch)
        return str(shapes).replace("'", "").replace("1 dimensions", "1 dimension")
    return ""


def _with_rows(elements: tf.data.Dataset) -> tf.data.Dataset:
    return elements.map(lambda *element: (pack(element), num_rows(pack(element))))
