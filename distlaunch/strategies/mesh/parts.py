"""State of a mesh in parts: which blocks of variables each process writes to a checkpoint, and which it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.state import ShardSlice, State

Block = tuple[tuple[int, int], ...]
"""Start and stop index of each dimension."""


@dataclass(frozen=True)
class StoredVariable:
    """A variable and the block that each device holds; only `value_of` differs between processes.

    Attributes:
        devices: for each device, the rank of its process and its block.
        value_of: returns a copy of a block that this process holds.
    """

    shape: tuple[int, ...]
    itemsize: int
    devices: list[tuple[int, Block]]
    value_of: Callable[[Block], np.ndarray]


class StoredProgram(Protocol):
    """A program whose devices hold parts of the variables."""

    def stored(self) -> dict[str, StoredVariable]:
        """Return all variables of a snapshot, by name; every process must call it."""
        ...

    def log_state(self) -> State:
        """Return the values of a snapshot that are not variables."""
        ...


class MeshParts:
    """Implementation of `Parts` for meshes."""

    def __init__(self, peers: Peers, program: StoredProgram) -> None:
        self._program = program
        self.rank, self.number = peers.rank, peers.number
        self.post, self.collect = peers.post, peers.collect

    def snapshot(self) -> tuple[State, Mapping[str, ShardSlice]]:
        stored = self._program.stored()
        state: State = self._program.log_state() if self.rank == 0 else {}
        slices = {}
        for name, block in assign_blocks(stored, self.number)[self.rank]:
            one = stored[name]
            if _is_whole(block, one.shape):
                state[name] = one.value_of(block)
                continue
            part = f"{name}[{','.join(f'{start}:{stop}' for start, stop in block)}]"
            state[part] = one.value_of(block)
            slices[part] = ShardSlice(name, one.shape, tuple(start for start, _ in block))
        return state, slices

    def needed_blocks(self) -> Mapping[str, list[tuple[slice, ...]]]:
        found = {}
        for name, one in self._program.stored().items():
            blocks = dict.fromkeys(block for rank, block in one.devices if rank == self.rank)
            if not any(_is_whole(block, one.shape) for block in blocks):
                found[name] = [tuple(slice(*bounds) for bounds in block) for block in blocks]
        return found


def assign_blocks(stored: Mapping[str, StoredVariable], number: int) -> list[list[tuple[str, Block]]]:
    """Return the blocks that each process writes.

    Each block is written by one process that holds it, and all processes write about the same number of bytes.
    """
    blocks = [
        (_num_bytes(block, one.itemsize), name, block, ranks)
        for name, one in stored.items()
        for block, ranks in _holders(one.devices).items()
    ]
    found: list[list[tuple[str, Block]]] = [[] for _ in range(number)]
    loads = [0] * number
    # the largest first, so that smaller ones can balance the loads
    for num_bytes, name, block, ranks in sorted(blocks, key=lambda one: (-one[0], one[1], one[2])):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += num_bytes
        found[rank].append((name, block))
    return found


def _holders(devices: Iterable[tuple[int, Block]]) -> dict[Block, set[int]]:
    found: dict[Block, set[int]] = {}
    for rank, block in devices:
        found.setdefault(block, set()).add(rank)
    return found


def _is_whole(block: Block, shape: tuple[int, ...]) -> bool:
    return all(bounds == (0, size) for bounds, size in zip(block, shape, strict=True))


def _num_bytes(block: Block, itemsize: int) -> int:
    return int(np.prod([stop - start for start, stop in block], dtype=np.int64)) * itemsize
