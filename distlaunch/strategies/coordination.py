"""Messages between the processes of a lockstep strategy: broadcasts by the chief, votes, gathers, and the common end.

They use the key-value store of the coordination service that TensorFlow and JAX run in the first process. Unlike
collectives, it needs no devices and transfers bytes unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from distlaunch.cluster.spec import ClusterSpec, Task
from distlaunch.cluster.tf_config import from_tf_config
from distlaunch.data.batches import Source
from distlaunch.data.differences import check_ends, kind_of

_POLL_MS = 500  # longest single wait, because Python handles signals only between two waits
_CHUNK_BYTES = 4 * 1024 * 1024  # largest entry of the store
_PREFIX = "distlaunch"
_LISTENING_S, _RETRY_S = 10.0, 0.01
"""Time to wait for the first process, and between two attempts to connect to it."""


@dataclass(frozen=True)
class Vote:
    """The vote of one task. All tasks receive the same combined vote, so they make the same decision."""

    stop: bool = False
    """Stop the run after this call (a signal was received)."""
    finish: bool = False
    """Training is done (a callback set `stop_training`)."""
    next_steps: int = 0
    """Number of steps of the next call; only the chief's value is used."""
    save: bool = False
    """Save a checkpoint after this call; only the chief's value is used, since its clock decides."""


class Store(Protocol):
    """Key-value store shared by all processes.

    Attributes:
        lost: exception that calls raise when the first process, which holds the store, is gone.
    """

    lost: type[Exception]

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        """Wait for a key, and return its value; None after the timeout."""
        ...

    def delete(self, key: str) -> None: ...

    def close(self) -> None:
        """Close the store. Every process makes this call at the same time, as its last one."""
        ...


def addresses_and_rank() -> tuple[list[str], int]:
    """Return the addresses of the processes that train, chief first, and this process's rank, from TF_CONFIG.

    A process without TF_CONFIG trains alone.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return [""], 0
    cluster, here = from_tf_config(text)
    tasks = _tasks(cluster)
    if here not in tasks:
        # an evaluator or a server, which does not train
        return [""], 0
    return [cluster.address(task) for task in tasks], tasks.index(here)


def await_chief(address: str, rank: int) -> None:
    """Wait until the first process listens, unless this is the first one.

    gRPC would try to connect at once, and try again only after a second. The wait ends after some time in any case:
    TensorFlow and JAX then wait themselves, and report what is wrong.
    """
    if rank == 0:
        return
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _LISTENING_S
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENING_S):
                return
        except ConnectionRefusedError:
            time.sleep(_RETRY_S)
        except OSError:
            return


def _tasks(cluster: ClusterSpec) -> list[Task]:
    return [task for task in cluster.tasks if task.job in ("chief", "worker")]


def _names() -> list[str]:
    return [str(task) for task in _tasks(from_tf_config(os.environ["TF_CONFIG"])[0])]


class Peers:
    """Communication with the processes that train together; all of them must call each method, in the same order.

    Args:
        number: number of processes.
        rank: rank of this process; 0 is the chief.
        store: store shared by the processes; None if there is only one.
        chief: address and port at which the other processes reach the chief.
    """

    def __init__(self, number: int = 1, rank: int = 0, store: Store | None = None, chief: str = "127.0.0.1:0") -> None:
        assert number == 1 or store is not None
        self.number, self.rank, self.chief_host = number, rank, chief.rpartition(":")[0]
        self._store: Any = store
        self._calls = 0  # the same in all processes, so that they use the same keys
        self._last_sum: str | None = None

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def from_chief(self, message: bytes) -> bytes:
        """Return the chief's message in every process."""
        if self.number == 1:
            return message
        name = self._next("message")
        if not self.is_chief:
            count = int(self._get(f"{name}/count"))
            received = b"".join(self._get(f"{name}/{index}") for index in range(count))
            # the chief deletes the entries when all processes have read them, because the store is in memory
            self._store.set(f"{name}/read/{self.rank}", b"1")
            return received
        keys = [f"{name}/{index}" for index in range(-(-len(message) // _CHUNK_BYTES))]
        for index, key in enumerate(keys):
            self._store.set(key, message[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES])
        # set last, so that a process that reads the count finds all pieces
        self._store.set(f"{name}/count", str(len(keys)).encode())
        for rank in range(1, self.number):
            self._take(f"{name}/read/{rank}")
        for key in (*keys, f"{name}/count"):
            self._store.delete(key)
        return message

    def agree(self, vote: Vote) -> Vote:
        """Return the votes of all processes as one.

        `stop` and `finish` are set if any process has set them; `save` and `next_steps` are the chief's.
        """
        if self.number == 1:
            return vote
        name = self._next("vote")
        if not self.is_chief:
            self._store.set(f"{name}/{self.rank}", _encode(vote))
            return _decode(self._get(f"{name}/sum"))
        votes = [vote, *(_decode(self._take(f"{name}/{rank}")) for rank in range(1, self.number))]
        # only the chief's clock and measured times count for `save` and `next_steps`
        total = Vote(any(each.stop for each in votes), any(each.finish for each in votes), vote.next_steps, vote.save)
        if self._last_sum is not None:
            self._store.delete(self._last_sum)  # all processes have voted again, so they have read the previous sum
        self._last_sum = f"{name}/sum"
        self._store.set(self._last_sum, _encode(total))
        return total

    @property
    def names(self) -> list[str]:
        """Names of the processes in the order of their ranks."""
        return _names() if self.number > 1 else [""]

    def gather(self, message: str) -> list[str]:
        """Return the messages of all processes in the order of their ranks."""
        if self.number == 1:
            return [message]
        name = self._next("gather")
        if not self.is_chief:
            # all processes get the list from the chief, so that their lists are the same
            self._store.set(f"{name}/{self.rank}", message.encode())
            return json.loads(self.from_chief(b""))
        # in the order of ranks, which is that of `names`
        messages = [message, *(self._take(f"{name}/{rank}").decode() for rank in range(1, self.number))]
        return json.loads(self.from_chief(json.dumps(messages).encode()))

    def post(self, key: str, message: str) -> None:
        """Send the chief a message under a new key; unlike the other methods, it can be called in any thread."""
        self._store.set(f"{_PREFIX}/post/{key}/{self.rank}", message.encode())

    def collect(self, key: str, given_up: Callable[[], bool]) -> list[str] | None:
        """Return the messages that the other processes have posted, in the order of ranks; for the chief only.

        Args:
            given_up: called while waiting; True ends the wait, and the result is None.
        """
        messages = []
        for rank in range(1, self.number):
            name = f"{_PREFIX}/post/{key}/{rank}"
            while (value := self._store.get(name, _POLL_MS)) is None:
                if given_up():
                    return None
            self._store.delete(name)
            messages.append(value.decode())
        return messages

    def has_data_ended(self, source: Source, *, ended: bool, steps: int, unknown: bool | None = None) -> bool:
        """Return whether the data ends here, with the same result in all processes.

        Args:
            ended: whether it has ended in this process.
            steps: number of global batches read so far in this pass.
            unknown: whether the length of the data is unknown, so that the processes must compare; None to use
                `source.ends`.

        Raises:
            DataError: the data has ended in some processes only.
        """
        if self.number == 1 or not (source.ends if unknown is None else unknown):
            return ended
        every = [message == "1" for message in self.gather("1" if ended else "0")]
        check_ends(every, self.names, steps, kind_of(source.name))
        return all(every)

    def leave(self) -> None:
        """Wait until no process needs this one.

        A process with the result of a sum may not yet have sent its part to all others, so no process may end before
        all of them have arrived here. The chief ends last, because it holds the store.
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
            with contextlib.suppress(self._store.lost):  # the chief may end before it answers
                self._store.set(f"{_PREFIX}/gone/{self.rank}", b"1")
        self._store.close()

    def _next(self, what: str) -> str:
        """Return a key that no earlier call has used."""
        self._calls += 1
        return f"{_PREFIX}/{what}/{self._calls}"

    def _get(self, key: str) -> bytes:
        while (value := self._store.get(key, _POLL_MS)) is None:
            pass
        return value

    def _take(self, key: str) -> bytes:
        """Wait for the value of a key that only this process reads, and delete it."""
        value = self._get(key)
        self._store.delete(key)
        return value


def _encode(vote: Vote) -> bytes:
    return json.dumps([bool(vote.stop), bool(vote.finish), int(vote.next_steps), bool(vote.save)]).encode()


def _decode(data: bytes) -> Vote:
    return Vote(*json.loads(data))
