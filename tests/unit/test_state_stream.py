"""A state on its way to other processes: over connections of their own, from the file itself, or over the store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import select
import shutil
import socket
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tensorflow")

from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.protocol import State
from distlaunch.strategies.state.state_stream import StateServer, fetch_state
from distlaunch.training.checkpoints import shared_memory
from distlaunch.training.checkpoints.file_copy import FileCopy
from distlaunch.training.checkpoints.files import CheckpointStore, DamagedError
from distlaunch.training.checkpoints.meta import Progress
from distlaunch.training.checkpoints.shared_memory import SharedMemory
from tests.unit.test_peers import DEADLINE_S, MemoryStore

STATE = {
    "a/b:0": np.arange(1_500_000, dtype=np.float32),
    "scale": np.array(1.5, ml_dtypes.bfloat16),
    "names": np.array(["x", "ü"]),
    "none": np.zeros((0, 3)),
}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        (value.dtype, value.shape, value.tobytes()) == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name, value in one.items()
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", socket.gethostname()])
def test_several_at_a_time(host: str) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with StateServer(STATE, host) as server, ThreadPoolExecutor(4) as pool:
        fetched = [pool.submit(fetch_state, host, server.port, server.secret) for _ in range(4)]
        assert all(same(one.result(DEADLINE_S), STATE) for one in fetched)


def test_who_does_not_know_the_secret_gets_nothing_and_holds_nobody_up() -> None:
    with StateServer(STATE, "127.0.0.1") as server, socket.create_connection(("127.0.0.1", server.port)) as silent:
        with socket.create_connection(("127.0.0.1", server.port)) as wrong:
            wrong.sendall(bytes(32))
            assert wrong.recv(1) == b""
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(server.secret[:5])
        assert same(fetch_state("127.0.0.1", server.port, server.secret), STATE)
        with pytest.raises((ValueError, OSError)):
            fetch_state("127.0.0.1", server.port, bytes(32))
        silent.settimeout(DEADLINE_S)
        assert silent.recv(1) == b"", "after some seconds"
    with pytest.raises(OSError, match="refused"):
        fetch_state("127.0.0.1", server.port, server.secret)


def test_many_strangers_are_told_once_and_have_few_threads(capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with StateServer(STATE, "127.0.0.1") as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(400)]
        assert same(fetch_state(*address, server.secret), STATE)
        silent[0].settimeout(DEADLINE_S)
        assert silent[0].recv(1) == b"", "the first of too many"
        assert threading.active_count() - before < 400
        slow, sent = silent[-1], 0
        with contextlib.suppress(OSError):
            while not select.select([slow], [], [], 0.5)[0]:
                slow.sendall(b"x")
                sent += 1
        assert sent < 32, "a byte now and then does not make the time longer"
    assert capfd.readouterr().err.count("without its secret; further ones are refused without a word") == 1


def test_what_is_changed_on_its_way_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as between, StateServer(STATE, "127.0.0.1") as server:

        def pass_on() -> None:
            one, _ = between.accept()
            with one, socket.create_connection(("127.0.0.1", server.port)) as other:
                other.sendall(one.recv(32, socket.MSG_WAITALL))
                sent = 0
                while part := other.recv(1 << 16):
                    at = 3_000_000 - sent
                    if 0 <= at < len(part):
                        part = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
                    one.sendall(part)
                    sent += len(part)

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(ValueError, match="changed on its way"):
            fetch_state("127.0.0.1", between.getsockname()[1], server.secret)
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("chief", ["127.0.0.1:1", "nowhere.invalid:1"], ids=["stream", "store"])
def test_who_has_it_keeps_it_and_who_has_not_gets_it(chief: str) -> None:
    """Where the chief cannot be reached but by the store, the store carries it."""
    store, own = MemoryStore(), {"mine": np.ones(2)}
    passed = [STATE, None, own, None]

    def act(rank: int) -> dict[str, np.ndarray]:
        return Peers(4, rank, store, chief).state_from_chief(passed[rank])

    with ThreadPoolExecutor(4) as pool:
        got = [one.result(DEADLINE_S) for one in [pool.submit(act, rank) for rank in range(4)]]
    assert got[2] is own
    assert all(same(got[rank], STATE) for rank in (0, 1, 3))
    assert sum(len(value) for value in store.values.values()) < 1000, "what was read is deleted"


@pytest.fixture(params=[True, False], ids=["local disk", "other disk"])
def is_local(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where checkpoints lie: the file itself is mapped, or a copy in memory."""
    monkeypatch.setattr(shared_memory, "is_local_disk", lambda path: request.param)
    return request.param


def test_memory_is_shared_by_all_of_one_host(tmp_path: Path, is_local: bool) -> None:
    """Each has a state of its own, whatever others do to theirs, also when the first has closed it."""
    store, memory = CheckpointStore(tmp_path), SharedMemory()
    store.save(STATE, Progress(step=1), {})
    saved = store.load(1, memory)
    assert same(saved.state, STATE)
    copy = FileCopy.from_plain(json.loads(json.dumps(saved.copy.to_plain())))
    assert copy == saved.copy
    assert copy.memory is not None
    assert os.path.samefile(copy.memory.path, saved.path / copy.files[0].name) == is_local
    before = (saved.path / copy.files[0].name).read_bytes()
    for value in saved.state.values():
        value[...] = value[..., ::-1] if value.ndim else value
    assert (saved.path / copy.files[0].name).read_bytes() == before, "no array is the file"
    saved = store.load(1, memory := SharedMemory())
    copy = saved.copy
    shutil.rmtree(tmp_path)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert same(pool.submit(_read_and_change, copy).result(DEADLINE_S) or {}, STATE)
    mine = copy.read() or {}
    mine["a/b:0"][0] = 7
    saved.state["a/b:0"][1] = 7
    assert same(copy.read() or {}, STATE)
    assert copy.memory is not None
    other = dataclasses.replace(copy.memory, identity=(0, 0, 0))
    assert dataclasses.replace(copy, memory=other).read() is None, "in a container, the path may lead to another"
    memory.close()
    assert copy.read() is None
    assert mine["a/b:0"][:2].tolist() == [7, 1]


@pytest.mark.parametrize("at", [3, 20, 300_000, 5_000_000, -1, None], ids=str)
@pytest.mark.usefixtures("is_local")
def test_a_damaged_file_does_not_get_into_memory(tmp_path: Path, at: int | None) -> None:
    """None: it is cut off."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        path, _ = store.save(STATE, Progress(step=step), {})
    file = path / store.load(2).copy.files[0].name
    data = bytearray(file.read_bytes())
    if at is not None:
        data[at] ^= 1
    file.write_bytes(data if at is not None else data[:-1])
    with pytest.raises(DamagedError, match=file.name):
        store.load(2, SharedMemory())
    saved = store.newest_good(memory=SharedMemory)
    assert saved is not None
    assert saved.progress.step == 1
    assert same(saved.state, STATE)


def _read_and_change(copy: FileCopy) -> State | None:
    state = copy.read()
    was = None if state is None else {name: value.copy() for name, value in state.items()}
    for value in (state or {}).values():
        value[...] = np.zeros((), value.dtype)
    return was


def test_files_are_read_by_all_who_can(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=1), {})
    told = store.load(1).copy
    copy = FileCopy.from_plain(told.to_plain())
    assert copy == told
    assert same(copy.read() or {}, STATE)
    path = Path(copy.folder, copy.files[0].name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert copy.read() is None, "as it was not verified"
    path.unlink()
    assert copy.read() is None
