"""Times how several processes get a checkpoint, relative to reading and verifying its file once in one process.

    python scripts/benchmark_restore.py [--megabytes 1000] [--processes 4] [--rounds 5]

    memory    one process reads and verifies the file, and the others map it, as on one host
    copied    one process reads and verifies the file, and the others map its copy in memory, as on one host whose run
              is on another host's disk
    file      each process reads and verifies the file, as on several hosts with the same disk; here on one machine
    network   one process reads the file, and the others get its bytes over connections and verify them
    stored    the same through a key-value store: base64 in pieces (an estimate without RPCs)

A process counts as ready when it has accessed every page of the state.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

LIMIT = 2.0
_PIECE = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    once, ratios, stored = measure(words.megabytes, words.processes, words.rounds)
    print(f"{words.megabytes} MB, {words.processes} processes; read and verified once: {statistics.median(once):.2f} s")
    for name, found in ratios.items():
        print(f"{name:<8} {statistics.median(found):.2f} times as long ({min(found):.2f} to {max(found):.2f})")
    print(f"stored   more than {1 + stored / statistics.median(once):.1f} times, for the encoding alone")
    sys.exit(statistics.median(ratios["memory"]) > LIMIT)


def measure(megabytes: int, processes: int, rounds: int) -> tuple[list[float], dict[str, list[float]], float]:
    """Return the seconds of reading once, the ratios of each way to these, and the seconds of `stored`."""
    import numpy as np

    # imported before anything is timed
    from distlaunch.checkpoints.meta import Progress
    from distlaunch.checkpoints.store import CheckpointStore

    with tempfile.TemporaryDirectory(prefix="restore-") as folder:
        store = CheckpointStore(Path(folder))
        rows = megabytes * 250_000 // 10
        state = {f"layer_{i}": np.random.default_rng(i).random(rows, np.float32) for i in range(10)}
        store.save(state, Progress(), {})
        piece = io.BytesIO(state["layer_0"].tobytes()).read(_PIECE)
        del state
        pipes = _others(processes - 1)
        ways: dict[str, Callable[[], Any]] = {
            "memory": lambda: _by_disk(store, pipes, on_this_host=True),
            "copied": lambda: _by_copy(store, pipes),
            "file": lambda: _by_disk(store, pipes, on_this_host=False),
            "network": lambda: _by_network(store, pipes),
        }
        once: list[float] = []
        ratios: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            once.append(_seconds(lambda: look(store.load(0).state)))
            for name, way in ways.items():
                ratios[name].append(_seconds(way) / once[-1])
    encoding = _seconds(lambda: base64.b64decode(base64.b64encode(piece)))
    return once, ratios, encoding * megabytes * 1e6 / _PIECE * (processes - 1)


def _seconds(action: Callable[[], Any]) -> float:
    """Return the duration of a call, whose result is freed before the next call begins."""
    began = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - began
    del result
    return seconds


def _others(number: int) -> list[Any]:
    """Start the other processes, and wait until their imports are done."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(number)]
    for _, theirs in ends:
        context.Process(target=_other, args=(theirs,), daemon=True).start()
    pipes = [ours for ours, _ in ends]
    for pipe in pipes:
        pipe.recv()
    return pipes


def _by_disk(store: Any, pipes: list[Connection], *, on_this_host: bool) -> Any:
    from distlaunch.checkpoints.distribution import ChiefState

    chief = ChiefState(on_this_host=on_this_host)
    saved = store.load(0, chief.read)
    assert chief.location is not None
    for pipe in pipes:
        pipe.send(("location", chief.location.to_plain()))
    look(saved.state)
    assert all(pipe.recv() for pipe in pipes), "all have got it"
    chief.close()
    return saved


def _by_copy(store: Any, pipes: list[Connection]) -> Any:
    with mock.patch("distlaunch.checkpoints.distribution.is_local_disk", return_value=False):
        return _by_disk(store, pipes, on_this_host=True)


def _by_network(store: Any, pipes: list[Connection]) -> Any:
    from distlaunch.checkpoints.distribution import ChiefState, StateServer

    chief = ChiefState()
    saved = store.load(0, chief.read)
    assert chief.location is not None
    with StateServer(chief.contents, "127.0.0.1") as server:
        _ask(pipes, ("network", server.port, server.secret, chief.location.to_plain()))
    chief.close()
    return saved


def _ask(pipes: list[Connection], what: tuple[Any, ...]) -> None:
    for pipe in pipes:
        pipe.send(what)
    assert all(pipe.recv() for pipe in pipes), "all have got it"


def look(state: dict[str, Any]) -> bool:
    """Access every page, since a mapping alone does not load the pages."""
    return all(value.reshape(-1).view("uint8")[::4096].sum() >= 0 for value in state.values())


def _other(pipe: Connection) -> None:
    from distlaunch.checkpoints.distribution import CheckpointLocation, fetch_state

    pipe.send(True)
    with contextlib.suppress(EOFError):
        while True:
            match pipe.recv():
                case "location", plain:
                    state = CheckpointLocation.from_plain(plain).read()
                    pipe.send(state is not None and look(state))
                case "network", port, secret, plain:
                    files = CheckpointLocation.from_plain(plain).files
                    state = fetch_state("127.0.0.1", port, secret, files)
                    pipe.send(look(state))
            state = None


if __name__ == "__main__":
    main()
