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
        once, file, network = [], [], []
        for _ in range(words.rounds):
            saved = None
            began = time.perf_counter()
            saved = store.load(0)
            once.append(time.perf_counter() - began)

            saved = None
            began = time.perf_counter()
            for pipe in pipes:
                pipe.send(str(store.state_path(0)))
            saved = store.load(0)
            _ask(pipes, ("file", saved.copy.to_plain()))
            file.append((time.perf_counter() - began) / once[-1])

            saved = None
            began = time.perf_counter()
            saved = store.load(0)
            with StateServer(saved.state, "127.0.0.1") as server:
                _ask(pipes, ("network", server.port, server.secret))
            network.append((time.perf_counter() - began) / once[-1])
        piece = io.BytesIO(saved.state["layer_0"].tobytes()).read(_PIECE)
        began = time.perf_counter()
        base64.b64decode(base64.b64encode(piece))
        stored = (time.perf_counter() - began) * words.megabytes * 1e6 / _PIECE * (words.processes - 1)
    print(f"{words.megabytes} MB, {words.processes} processes; read and verified once: {statistics.median(once):.2f} s")
    for name, ratios in (("file", file), ("network", network)):
        print(f"{name:<8} {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"stored   more than {1 + stored / statistics.median(once):.1f} times, for the encoding alone")
    sys.exit(statistics.median(file) > LIMIT)


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
