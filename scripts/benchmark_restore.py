"""Times how a checkpoint comes into several processes, as ratios to reading and verifying its file once in one.

python scripts/benchmark_restore.py [--megabytes 1000] [--processes 4] [--rounds 5]

memory    the first reads and verifies the file, the others map its memory, as processes of one host do
file      each reads and verifies the file, as processes of other hosts with the same disk do, here on one machine
network   the first reads the file, the others have the state from it over connections
stored    the same over a store of keys, as the first version had it: base64 in pieces (an estimate without RPCs)

Each process looks at every page of the state before it counts as there.
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
    import numpy as np

    from distlaunch.strategies.state_stream import StateServer
    from distlaunch.training.checkpoints.files import CheckpointStore
    from distlaunch.training.checkpoints.meta import Progress
    from distlaunch.training.checkpoints.shared_memory import SharedMemory

    with tempfile.TemporaryDirectory(prefix="restore-") as folder:
        store = CheckpointStore(Path(folder))
        rows = words.megabytes * 250_000 // 10
        state = {f"layer_{i}": np.random.default_rng(i).random(rows, np.float32) for i in range(10)}
        store.save(state, Progress(), {})
        del state
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(words.processes - 1)]
        others = [context.Process(target=_other, args=(theirs,), daemon=True) for _, theirs in ends]
        for other in others:
            other.start()
        pipes = [ours for ours, _ in ends]
        for pipe in pipes:
            pipe.recv()
        once: list[float] = []
        ratios: dict[str, list[float]] = {"memory": [], "file": [], "network": []}
        for _ in range(words.rounds):
            saved = None
            began = time.perf_counter()
            saved = store.load(0)
            look(saved.state)
            once.append(time.perf_counter() - began)

            saved, memory = None, SharedMemory()
            began = time.perf_counter()
            saved = store.load(0, memory)
            _ask(pipes, ("copy", saved.copy.to_plain()))
            look(saved.state)
            ratios["memory"].append((time.perf_counter() - began) / once[-1])
            memory.close()

            plain, saved = {**saved.copy.to_plain(), "memory": None}, None
            began = time.perf_counter()
            for pipe in pipes:
                pipe.send(("copy", plain))
            saved = store.load(0)
            look(saved.state)
            assert all(pipe.recv() for pipe in pipes)
            ratios["file"].append((time.perf_counter() - began) / once[-1])

            saved = None
            began = time.perf_counter()
            saved = store.load(0)
            with StateServer(saved.state, "127.0.0.1") as server:
                _ask(pipes, ("network", server.port, server.secret))
            ratios["network"].append((time.perf_counter() - began) / once[-1])
        piece = io.BytesIO(saved.state["layer_0"].tobytes()).read(_PIECE)
        began = time.perf_counter()
        base64.b64decode(base64.b64encode(piece))
        stored = (time.perf_counter() - began) * words.megabytes * 1e6 / _PIECE * (words.processes - 1)
    print(f"{words.megabytes} MB, {words.processes} processes; read and verified once: {statistics.median(once):.2f} s")
    for name, found in ratios.items():
        print(f"{name:<8} {statistics.median(found):.2f} times as long ({min(found):.2f} to {max(found):.2f})")
    print(f"stored   more than {1 + stored / statistics.median(once):.1f} times, for the encoding alone")
    sys.exit(statistics.median(ratios["memory"]) > LIMIT)


def _ask(pipes: list[Connection], what: tuple[Any, ...]) -> None:
    for pipe in pipes:
        pipe.send(what)
    assert all(pipe.recv() for pipe in pipes), "all have got it"


def look(state: dict[str, Any]) -> bool:
    """Looks at every page, which a mapping alone does not bring in."""
    return all(value.reshape(-1).view("uint8")[::4096].sum() >= 0 for value in state.values())


def _other(pipe: Connection) -> None:
    from distlaunch.strategies.state_stream import fetch_state
    from distlaunch.training.checkpoints.file_copy import FileCopy

    pipe.send(True)
    with contextlib.suppress(EOFError):
        while True:
            match pipe.recv():
                case "copy", plain:
                    state = FileCopy.from_plain(plain).read()
                    pipe.send(state is not None and look(state))
                case "network", port, secret:
                    state = fetch_state("127.0.0.1", port, secret)
                    pipe.send(look(state))
            state = None


if __name__ == "__main__":
    main()
