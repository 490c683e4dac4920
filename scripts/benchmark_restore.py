"""Times how a checkpoint comes into several processes, as ratios to reading and verifying its file once in one.

python scripts/benchmark_restore.py [--megabytes 1000] [--processes 4] [--rounds 5]

file      each process has the state: the first verifies the file, the others read it meanwhile
network   the first reads the file, the others have the state from it over connections
stored    the same over a store of keys, as the first version had it: base64 in pieces (an estimate without RPCs)
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

LIMIT = 2.0
_PIECE = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    once, file, network, stored = measure(words.megabytes, words.processes, words.rounds)
    print(f"{words.megabytes} MB, {words.processes} processes; read and verified once: {statistics.median(once):.2f} s")
    for name, ratios in (("file", file), ("network", network)):
        print(f"{name:<8} {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"stored   more than {1 + stored / statistics.median(once):.1f} times, for the encoding alone")
    sys.exit(statistics.median(file) > LIMIT)


def measure(megabytes: int, processes: int, rounds: int) -> tuple[list[float], list[float], list[float], float]:
    """Seconds of reading once; the ratios of `file` and of `network` to them; seconds of `stored`."""
    import numpy as np

    # imported before anything is timed
    from distlaunch.strategies.state_stream import StateServer
    from distlaunch.training.checkpoints.files import CheckpointStore
    from distlaunch.training.checkpoints.meta import Progress

    with tempfile.TemporaryDirectory(prefix="restore-") as folder:
        store = CheckpointStore(Path(folder))
        rows = megabytes * 250_000 // 10
        state = {f"layer_{i}": np.random.default_rng(i).random(rows, np.float32) for i in range(10)}
        store.save(state, Progress(), {})
        piece = io.BytesIO(state["layer_0"].tobytes()).read(_PIECE)
        del state
        pipes = _others(processes - 1)
        once, file, network = [], [], []
        for _ in range(rounds):
            once.append(_seconds(lambda: store.load(0)))
            file.append(_seconds(lambda: _by_file(store, pipes)) / once[-1])
            network.append(_seconds(lambda: _by_network(StateServer, store, pipes)) / once[-1])
    encoding = _seconds(lambda: base64.b64decode(base64.b64encode(piece)))
    return once, file, network, encoding * megabytes * 1e6 / _PIECE * (processes - 1)


def _seconds(action: Callable[[], Any]) -> float:
    """What it takes; what it returns is freed before the next begins."""
    began = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - began
    del result
    return seconds


def _others(number: int) -> list[Connection]:
    """Starts the other processes, and waits until they have imported what they need."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(number)]
    for _, theirs in ends:
        context.Process(target=_other, args=(theirs,), daemon=True).start()
    pipes = [ours for ours, _ in ends]
    for pipe in pipes:
        pipe.recv()
    return pipes


def _by_file(store: Any, pipes: list[Connection]) -> Any:
    for pipe in pipes:
        pipe.send(str(store.state_path(0)))
    saved = store.load(0)
    _ask(pipes, ("file", saved.copy.to_plain()))
    return saved


def _by_network(server_of: Any, store: Any, pipes: list[Connection]) -> Any:
    saved = store.load(0)
    with server_of(saved.state, "127.0.0.1") as server:
        _ask(pipes, ("network", server.port, server.secret))
    return saved


def _ask(pipes: list[Connection], what: tuple[Any, ...]) -> None:
    for pipe in pipes:
        pipe.send(what)
    assert all(pipe.recv() for pipe in pipes), "all have got it"


def _other(pipe: Connection) -> None:
    from distlaunch.strategies.state_stream import fetch_state
    from distlaunch.training.checkpoints.file_copy import FileCopy, read_ahead

    pipe.send(True)
    ahead = None
    with contextlib.suppress(EOFError):
        while True:
            match pipe.recv():
                case str(path):
                    ahead = read_ahead(Path(path))
                case "file", copy:
                    pipe.send(FileCopy.from_plain(copy).read(ahead) is not None)
                    ahead = None
                case "network", port, secret:
                    pipe.send(len(fetch_state("127.0.0.1", port, secret)) > 0)


if __name__ == "__main__":
    main()
