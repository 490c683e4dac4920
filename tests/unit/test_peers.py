"""Processes that talk over a key-value store, here threads with a store in memory."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from distlaunch.strategies.coordination import Peers, Vote, addresses_and_rank, await_chief

DEADLINE_S = 60.0


class MemoryStore:
    lost = KeyError

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.closed = 0
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.values, f"{key} is set twice"
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, timeout_ms / 1000)
            return self.values.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            del self.values[key]

    def close(self) -> None:
        with self._changed:
            self.closed += 1


def in_each(number: int, action: Callable[[Peers], Any]) -> tuple[list[Any], MemoryStore]:
    """Run an action in each process, and return the results and the store."""
    store = MemoryStore()
    with ThreadPoolExecutor(number) as pool:
        running = [pool.submit(action, Peers(number, rank, store)) for rank in range(number)]
        return [one.result(DEADLINE_S) for one in running], store


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 3, 9_000_000])
def test_all_get_the_message_of_the_chief(number: int, size: int) -> None:
    message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    got, store = in_each(number, lambda peers: peers.from_chief(message if peers.is_chief else b"is_heartbeat_loss"))
    assert got == [message] * number
    assert all("read" in key or len(value) < 9 for key, value in store.values.items()), "what was read is deleted"


def test_nothing_that_peers_send_is_a_pickle() -> None:
    sent = []

    class Watched(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            sent.append(value)
            super().set(key, value)

    store = Watched()
    chief, other = Peers(2, 0, store), Peers(2, 1, store)
    with ThreadPoolExecutor(2) as pool:
        for act in (lambda p: p.agree(Vote(stop=True)), lambda p: p.gather("here"), lambda p: p.from_chief(b"x")):
            for one in [pool.submit(act, chief), pool.submit(act, other)]:
                one.result(DEADLINE_S)
    assert not [value for value in sent if value.startswith(b"\x80")], "pickles begin with this byte"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_votes(number: int) -> None:
    """All processes see one vote to stop, in the same call; of the proposed lengths, the chief's is used."""

    def vote(peers: Peers) -> list[Vote]:
        last = peers.rank == number - 1
        return [peers.agree(Vote(stop=last and call == 2, next_steps=10 * peers.rank + call)) for call in range(4)]

    got, store = in_each(number, vote)
    assert got == [[Vote(stop=call == 2, next_steps=call) for call in range(4)]] * number
    assert len(store.values) <= 1, "votes do not pile up"


def test_nobody_leaves_before_all_have_come() -> None:
    here: list[int] = []

    def leave(peers: Peers) -> int:
        here.append(peers.rank)
        peers.leave()
        return len(here)

    got, store = in_each(3, leave)
    assert got == [3, 3, 3]
    assert store.closed == 3


def test_the_chief_may_be_gone_before_it_answers() -> None:
    class Gone(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            super().set(key, value)
            if "gone" in key:
                raise KeyError(key)

    store = Gone()
    store.set("distlaunch/here/0", b"1")
    Peers(2, 1, store).leave()


def test_place_in_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert addresses_and_rank() == ([""], 0)
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "evaluator": ["d:1"]}
    for task, rank in (("chief", 0), ("worker", 1)):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": task, "index": 0}}))
        assert addresses_and_rank() == (["a:1", "b:1", "c:1"], rank)


def test_the_others_wait_until_the_chief_listens() -> None:
    with socket.socket() as chief, ThreadPoolExecutor(1) as pool:
        chief.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chief.getsockname()[1]}"
        await_chief(address, 0)  # the chief itself does not wait
        waiting = pool.submit(await_chief, address, 1)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        chief.listen()
        waiting.result(DEADLINE_S)
    await_chief("no-such-host.invalid:1", 1)  # the framework reports it
