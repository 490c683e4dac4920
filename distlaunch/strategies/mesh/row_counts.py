"""Puts batches of process-local rows on a mesh, even if the processes have different numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distlaunch.data.batches import Batch
from distlaunch.data.structures import map_structure
from distlaunch.strategies.coordination import Peers


@dataclass(frozen=True)
class RowCounts:
    """Number of rows of a global batch in each process.

    Attributes:
        counts: number of rows by rank; 0 if the process's data has ended.
        rank: rank of this process.
        parts: number of equal parts into which the devices of a process split its rows.
    """

    counts: tuple[int, ...]
    rank: int
    parts: int

    @classmethod
    def gather(cls, peers: Peers, rows: int, parts: int) -> RowCounts:
        """Return the counts of all processes; every process must call it for every batch."""
        return cls(tuple(int(count) for count in peers.gather(str(rows))), peers.rank, parts)

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def even(self) -> bool:
        """True if each device can get the same number of rows from its own process."""
        return len(set(self.counts)) == 1 and self.counts[0] % self.parts == 0

    @property
    def start(self) -> int:
        """Index of this process's first row in the batch."""
        return sum(self.counts[: self.rank])

    @property
    def padded(self) -> int:
        """Number of rows to which each process pads its rows to make the batch even."""
        return -(-max(self.counts) // self.parts) * self.parts

    def place(
        self,
        batch: Batch,
        put: Callable[[Batch, int, int], Batch],
        gathered: Callable[[Any], np.ndarray],
        leaf_of: Callable[[np.ndarray], Any],
    ) -> Batch:
        """Return the global batch on the mesh, to which each process contributes its rows.

        Args:
            put: function `(rows, start, total)` that puts on this process's devices all rows that they need.
            gathered: returns a whole leaf, joined from the parts on all devices; every process calls it.
            leaf_of: converts an array to the type that `put` takes.
        """
        if self.even:
            return put(batch, self.start, self.total)
        # some devices need rows of another process, which happens only near the end of a pass
        padded = map_structure(lambda leaf: leaf_of(self._pad(np.asarray(leaf))), batch)
        split = put(padded, self.rank * self.padded, len(self.counts) * self.padded)
        whole = map_structure(lambda leaf: leaf_of(self._select(gathered(leaf))), split)
        return put(whole, 0, self.total)

    def _pad(self, rows: np.ndarray) -> np.ndarray:
        """Return this process's rows, without a stand-in row, padded with zeros."""
        mine = rows[: self.counts[self.rank]]
        return np.concatenate([mine, np.zeros((self.padded - len(mine), *rows.shape[1:]), rows.dtype)])

    def _select(self, padded: np.ndarray) -> np.ndarray:
        """Return the rows of the batch from the zero-padded rows of all processes."""
        places = [np.arange(count) + rank * self.padded for rank, count in enumerate(self.counts)]
        return padded[np.concatenate(places)]
