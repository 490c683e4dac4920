"""What the processes of a lockstep strategy tell each other: who is there, the chief's messages, votes, the end.

All goes over the key-value store of the coordination service that TensorFlow and JAX keep in the first process, beside
their collectives: it needs no devices, and carries bytes unchanged.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any, Protocol

from distlaunch.cluster.spec import from_tf_config
from distlaunch.strategies.protocol import StrategyDefaults, Vote

_TURN_MS = 500  # a wait is cut into such turns, since signals are handled between them
_CHUNK_BYTES = 4 * 1024 * 1024  # of one entry of the store
_PREFIX = "distlaunch"


class Store(Protocol):
    """Keys with values, the same for all processes.

    Attributes:
        lost: what calls raise when the first process is gone.
    """

    lost: type[Exception]

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        """Waits for a key; None if it has not come in time."""
        ...

    def delete(self, key: str) -> None: ...

    def close(self) -> None:
        """The last call, by all processes at the same time."""
        ...


def addresses_and_rank() -> tuple[list[str], int]:
    """Addresses of the processes that train, the chief first, and this one's place, from TF_CONFIG.

    A process without TF_CONFIG is alone.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return [""], 0
    cluster, here = from_tf_config(text)
    tasks = [task for task in cluster.tasks if task.job in ("chief", "worker")]
    if here not in tasks:
        return [""], 0
    return [cluster.address(task) for task in tasks], tasks.index(here)


class Peers:
    """This process among those that train together; each method must be called by all, in the same order.

    Args:
        rank: place of this process; 0 is the chief.
        store: None if this process is alone.
    """

    def __init__(self, number: int = 1, rank: int = 0, store: Store | None = None) -> None:
        assert number == 1 or store is not None
        self.number, self.rank = number, rank
        self._store: Any = store
        self._calls = 0
        self._last_sum: str | None = None

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def from_chief(self, message: bytes) -> bytes:
        """The chief's message."""
        if self.number == 1:
            return message
        name = self._next("message")
        if not self.is_chief:
            count = int(self._get(f"{name}/count"))
            received = b"".join(self._get(f"{name}/{index}") for index in range(count))
            self._store.set(f"{name}/read/{self.rank}", b"1")
            return received
        keys = [f"{name}/{index}" for index in range(-(-len(message) // _CHUNK_BYTES))]
        for index, key in enumerate(keys):
            self._store.set(key, message[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES])
        self._store.set(f"{name}/count", str(len(keys)).encode())
        for rank in range(1, self.number):
            self._take(f"{name}/read/{rank}")
        for key in (*keys, f"{name}/count"):
            self._store.delete(key)
        return message

    def object_from_chief(self, value: Any) -> Any:
        """What the chief passes; anything that can be pickled."""
        if self.number == 1:
            return value
        return pickle.loads(self.from_chief(pickle.dumps(value) if self.is_chief else b""))

    def agree(self, vote: Vote) -> Vote:
        """The sum of all votes; of `next_steps` the chief's counts."""
        if self.number == 1:
            return vote
        name = self._next("vote")
        if not self.is_chief:
            self._store.set(f"{name}/{self.rank}", pickle.dumps(vote))
            return pickle.loads(self._get(f"{name}/sum"))
        votes = [vote, *(pickle.loads(self._take(f"{name}/{rank}")) for rank in range(1, self.number))]
        total = Vote(any(one.stop for one in votes), any(one.finish for one in votes), vote.next_steps)
        if self._last_sum is not None:
            self._store.delete(self._last_sum)  # whoever has voted again has read it
        self._last_sum = f"{name}/sum"
        self._store.set(self._last_sum, pickle.dumps(total))
        return total

    def leave(self) -> None:
        """Waits until no process needs this one any more.

        A process that has its sum may still owe the others parts of theirs, so none may end before all have come here.
        The chief keeps the store, so it is the last to go.
        """
        if self.number == 1:
            return
        self._store.set(f"{_PREFIX}/here/{self.rank}", b"1")
        for rank in range(self.number):
            self._get(f"{_PREFIX}/here/{rank}")
        if self.is_chief:
            for rank in range(1, self.number):
                self._get(f"{_PREFIX}/gone/{rank}")
        else:
            with contextlib.suppress(self._store.lost):  # the chief may go as soon as it knows, before it has answered
                self._store.set(f"{_PREFIX}/gone/{self.rank}", b"1")
        self._store.close()

    def _next(self, what: str) -> str:
        """A key that no call before has used."""
        self._calls += 1
        return f"{_PREFIX}/{what}/{self._calls}"

    def _get(self, key: str) -> bytes:
        while (value := self._store.get(key, _TURN_MS)) is None:
            pass
        return value

    def _take(self, key: str) -> bytes:
        """Gets what nobody else wants."""
        value = self._get(key)
        self._store.delete(key)
        return value


class AmongPeers(StrategyDefaults):
    """A strategy whose processes train together; a subclass sets `_peers`."""

    _peers: Peers

    @property
    def is_chief(self) -> bool:
        return self._peers.is_chief

    def from_chief(self, message: bytes) -> bytes:
        return self._peers.from_chief(message)

    def leave(self) -> None:
        self._peers.leave()
