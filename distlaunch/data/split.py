"""One split of the data, as global batches of row sources at any position of an endless sequence of passes.

A *pass* goes once through the training data. Its order depends on the seed and the number of the pass alone, so that
every process of a run sees the same global batches, and a resumed run continues where the old one stopped.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.data.batches import Batch, Source, num_rows, pack
from distlaunch.data.running_fingerprint import RunningFingerprint

_ZERO = np.int64(0)


@dataclass(frozen=True)
class Batching:
    """Signs that the elements of a pipeline are batches, although the config does not say so.

    Attributes:
        rows: leading dimension that all parts of the first element share.
        is_certain: the pipeline itself shows it; else only a model can that takes one dimension less.
        is_even: the next elements have the same leading dimension.
    """

    rows: int
    is_certain: bool
    is_even: bool


@dataclass(frozen=True)
class Split:
    """One split, ready to be read.

    Attributes:
        num_examples: None if unknown.
        num_batches: global batches of one pass; None if unknown.
        batches: pass number (an int64 tensor) and first batch -> dataset of row sources.
        load: see `Source.load`.
        empty: a row source without rows, which marks an end.
        sample: number of examples -> a dataset of one row source with the first so many, as they are before any
            shuffle: to learn shapes, no buffer is filled.
        endless: the pipeline repeats for ever, so that a pass has no end.
        name: `train` or `validation`.
        pick: pass and batch number in it -> a row source, at once; None where it takes reading all before it.
        load_raw: as `load`, without the preprocessing.
        unaugmented: the same without `data.augment`; None where it does not change this split.
        reads_all: the name of what every process reads whole, and not its own rows alone; empty otherwise.
        notes: what is to be said about it at the start of a run.
        is_numbered: batches are found by number although there is no end to them.
        batching: return what suggests that the elements are batches already; None where nothing does.
        in_order: of a split for training: return the same examples as they are evaluated, unchanged, in their own
            order and all of them.
        check: see `Source.check`.
        labels: those of all examples, where they are arrays that nothing changes.
        describe: the row source's examples for a comparison of processes; see `data/fingerprints.py`.
        at_once, threads: see `Source`.
        work: what it does to each of them, in words: `reading`, `map`, `augment`, several of them, or nothing.
        in_python: Python code of the user's reads the examples.
        buffer: how many examples a shuffle holds in this process, and their bytes.
        glimpse: what of a row source of a pipeline is compared with other processes; None where nothing can be.
        running: where it is compared.
        own: other processes have other examples, and their parts of each batch; see `Source.own`.
        forever: pass after pass without ends, where that is not one whole pass after the other.
        global_batch: rows of a batch, but for the last one of a pass.
    """

    num_examples: int | None
    num_batches: int | None
    batches: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]
    load: Callable[..., Batch]
    empty: Any
    sample: Callable[[int], tf.data.Dataset]
    endless: bool = False
    name: str = "train"
    pick: Callable[[int, int], Any] | None = None
    load_raw: Callable[..., Batch] | None = None
    unaugmented: Split | None = None
    reads_all: str = ""
    notes: tuple[str, ...] = ()
    is_numbered: bool = False
    batching: Callable[[], Batching | None] = lambda: None
    in_order: Callable[[], Split] | None = None
    check: Callable[[Batch], Batch] | None = None
    labels: Any = None
    describe: Callable[[], str] = lambda: "{}"
    at_once: int | None = None
    threads: int = 0
    work: str = ""
    in_python: bool = False
    buffer: Callable[[], tuple[int, int]] = lambda: (0, 0)
    glimpse: Callable[[Any], Any] | None = None
    running: RunningFingerprint | None = None
    own: bool = False
    forever: Callable[[], tf.data.Dataset] | None = None
    global_batch: int | None = None

    def training_source(
        self, first_pass: int, offset: int, *, ends_visible: bool, skip: int = 0, batches: int | None = None,
        passes: int | None = None,
    ) -> Source:  # fmt: skip
        """Pass after pass.

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
            if self.own:
                return self._own_pass(rows, start, ends=ends_visible)
            return rows.concatenate(tf.data.Dataset.from_tensors(self.empty)) if ends_visible else rows

        # passes are counted within the pipeline, which so runs on from one to the next
        last = np.iinfo(np.int64).max if passes is None else first_pass + passes
        elements = tf.data.Dataset.range(first_pass, last).flat_map(one_pass)
        if self.forever is not None and self.num_batches is None and not ends_visible:
            elements = _with_rows(self.forever()) if self.own else self.forever()
        first = position if self.num_batches is None else first_pass * self.num_batches + offset
        elements = elements.skip(skip) if skip else elements
        if self.running is not None and self.glimpse is not None:
            self.running.begin()
            elements = self.running.watched(elements, self.glimpse)
        if batches is not None:
            elements = elements.take(batches)
        if batches is not None or passes is not None:
            elements = elements.concatenate(self._ends())
        return self._source(elements, self.name, first, ends=ends_visible)

    def evaluation_source(self) -> Source:
        """One pass in its own order, then elements without rows for ever."""
        rows = self.batches(_ZERO, _ZERO)
        elements = (self._own_pass(rows, _ZERO, ends=True) if self.own else rows).concatenate(self._ends())
        return self._source(elements, f"{self.name}:once", 0, ends=self.num_batches is None)

    def first_rows(self, rows: int, *, raw: bool = False) -> Batch:
        """Return the batch of the first few examples, not augmented; `raw`: before the preprocessing."""
        if self.unaugmented is not None:
            self._check_augmented(self.unaugmented)
            return self.unaugmented.first_rows(rows, raw=raw)
        load = self.load_raw if raw and self.load_raw is not None else self.load
        for element in self.sample(rows).take(1):
            return load(element)
        raise ConfigError(Problem(("data",), "the dataset is empty"))

    def _check_augmented(self, plain: Split) -> None:
        """Raise ConfigError if `data.augment` does not take an example, or makes one of another form of it."""
        augmented, given = (_form(split.load_raw or split.load, split.sample(1)) for split in (self, plain))
        if augmented != given:
            message = f"it makes examples of the form {augmented} of examples of the form {given}"
            hint = "return as many values with as many dimensions; what changes their form belongs in `data.map`"
            raise ConfigError(Problem(("data", "augment"), f"{message}; {hint}"))

    def _source(self, elements: tf.data.Dataset, name: str, first: int, *, ends: bool) -> Source:
        ends = ends and not self.own  # those of one's own data are agreed upon with the rows of each batch
        return Source(
            elements, self.load, name, first, self.num_batches, ends, self.at_once, self.threads, self.describe,
            self.own, self.global_batch, self.check,
        )  # fmt: skip

    def _own_pass(self, rows: tf.data.Dataset, start: tf.Tensor, *, ends: bool) -> tf.data.Dataset:
        """To the end of the longest pass of all processes: known, or with `ends` found out as it goes."""
        if self.num_batches is not None:
            return _with_rows(rows).concatenate(self._ends()).take(self.num_batches - start)
        return _with_rows(rows).concatenate(self._ends()) if ends else _with_rows(rows)

    def _ends(self) -> tf.data.Dataset:
        if not self.own:
            return tf.data.Dataset.from_tensors(self.empty).repeat()
        return self.sample(1).take(1).map(lambda *element: (pack(element), _ZERO)).repeat()


def after(load: Callable[..., Batch], action: Callable[[Batch], Batch]) -> Callable[..., Batch]:
    """A `load` whose batches go through an action."""
    return lambda rows, *, at_once=1: action(load(rows, at_once=at_once))


def _form(load: Callable[..., Batch], sample: tf.data.Dataset) -> str:
    """Return the structure of an example, with the number of dimensions of each value; empty if there is none."""
    for element in sample.take(1):
        shapes = tf.nest.map_structure(lambda leaf: f"{leaf.shape.rank - 1} dimensions", load(element))
        return str(shapes).replace("'", "").replace("1 dimensions", "1 dimension")
    return ""


def _with_rows(elements: tf.data.Dataset) -> tf.data.Dataset:
    return elements.map(lambda *element: (pack(element), num_rows(pack(element))))
