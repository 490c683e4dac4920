"""Batches of which each process has rows that no other process has: whose rows are where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.data.batches import Batch
from distlaunch.strategies.coordination import Peers


@dataclass(frozen=True)
class RowCounts:
    """How many rows of a global batch each process has.

    Attributes:
        counts: by rank; 0: its data has ended.
        rank: of this process.
        parts: into how many equal parts its devices cut its rows.
    """

    counts: tuple[int, ...]
    rank: int
    parts: int

    @classmethod
    def agreed(cls, peers: Peers, rows: int, parts: int) -> RowCounts:
        """Every process must call it for every batch, with what it has."""
        return cls(tuple(int(count) for count in peers.gather(str(rows))), peers.rank, parts)

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def even(self) -> bool:
        """Whether each device can have as many rows as any other, all from its own process."""
        return len(set(self.counts)) == 1 and self.counts[0] % self.parts == 0

    @property
    def start(self) -> int:
        """Place of this process's first row in the batch."""
        return sum(self.counts[: self.rank])

    @property
    def padded(self) -> int:
        """Rows of each process with which the batch is even."""
        return -(-max(self.counts) // self.parts) * self.parts

    def place(
        self,
        batch: Batch,
        put: Callable[[Batch, int, int], Batch],
        gathered: Callable[[Any], np.ndarray],
        leaf_of: Callable[[np.ndarray], Any],
    ) -> Batch:
        """The global batch on the mesh, of the rows that this process has.

        Args:
            put: `(rows, start, total)` onto the devices, of whose rows these are what the devices here need.
            gathered: a part of a batch, from all devices; every process calls it.
            leaf_of: makes of an array what `put` takes.
        """
        if self.even:
            return put(batch, self.start, self.total)
        # rows of one process on devices of another: near the end of a pass only
        padded = tf.nest.map_structure(lambda leaf: leaf_of(self._pad(np.asarray(leaf))), batch)
        split = put(padded, self.rank * self.padded, len(self.counts) * self.padded)
        whole = tf.nest.map_structure(lambda leaf: leaf_of(self._select(gathered(leaf))), split)
        return put(whole, 0, self.total)

    def _pad(self, rows: np.ndarray) -> np.ndarray:
        """The rows of this process, and zeros for those it lacks; a stand-in is left out."""
        mine = rows[: self.counts[self.rank]]
        return np.concatenate([mine, np.zeros((self.padded - len(mine), *rows.shape[1:]), rows.dtype)])

    def _select(self, padded: np.ndarray) -> np.ndarray:
        """The rows of the batch out of those of all processes, each with its zeros."""
        places = [np.arange(count) + rank * self.padded for rank, count in enumerate(self.counts)]
        return padded[np.concatenate(places)]
