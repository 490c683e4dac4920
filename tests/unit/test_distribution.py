"""A state on its way to other processes: from the disk, from the chief over connections, or over the store."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tensorflow")

from distlaunch.checkpoints import distribution, state_files
from distlaunch.checkpoints.distribution import (
    CheckpointLocation,
    ChiefState,
    StateServer,
    fetch_state,
    share_state,
)
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.state_files import FileDamagedError, StateFile, StateFiles, write_file
from distlaunch.checkpoints.store import CheckpointStore, DamagedError
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.state import ShardSlice, State
from tests.unit.read_location import read_and_change
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


@dataclass
class Served:
    """A server of the files of a state, and how it is asked for them."""

    server: StateServer
    files: list[StateFile]
    host: str = "127.0.0.1"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.server.port

    def fetch(self, secret: bytes | None = None, port: int | None = None, **needed: Any) -> State:
        return fetch_state(self.host, port or self.server.port, secret or self.server.secret, self.files, **needed)


@contextlib.contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[Served]:
    file = write_file(folder, "one", STATE, {})
    with StateFiles.on_disk(folder, [file]) as files, StateServer(files.contents, host) as server:
        yield Served(server, [file], host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", socket.gethostname()])
def test_several_at_a_time(tmp_path: Path, host: str) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with serving(tmp_path, host) as served, ThreadPoolExecutor(4) as pool:
        (tmp_path / "one").unlink()  # the chief has it open
        fetched = [pool.submit(served.fetch) for _ in range(4)]
        assert all(same(one.result(DEADLINE_S), STATE) for one in fetched)


def test_who_does_not_know_the_secret_gets_nothing_and_holds_nobody_up(tmp_path: Path) -> None:
    with serving(tmp_path) as served, socket.create_connection(served.address) as silent:
        with socket.create_connection(served.address) as wrong:
            wrong.sendall(bytes(32))
            assert wrong.recv(1) == b""
        with socket.create_connection(served.address) as gone:
            gone.sendall(served.server.secret[:5])
        assert same(served.fetch(), STATE)
        with pytest.raises(OSError, match=r"ended|reset|pipe"):
            served.fetch(bytes(32))
        silent.settimeout(DEADLINE_S)
        assert silent.recv(1) == b"", "after some seconds"
    with pytest.raises(OSError, match="refused"):
        served.fetch()


@pytest.mark.parametrize("asked", [(7, 0, 10), (0, 1 << 60, 10), (0, 0, 1 << 60)], ids=["file", "offset", "size"])
def test_a_request_for_what_there_is_not_harms_nobody(tmp_path: Path, asked: tuple[int, int, int]) -> None:
    with serving(tmp_path) as served, socket.create_connection(served.address) as asking:
        asking.settimeout(DEADLINE_S)
        asking.sendall(served.server.secret + struct.pack("!IQQ", *asked))
        received = 0
        while part := asking.recv(1 << 20):
            received += len(part)
        assert received <= served.files[0].num_bytes
        assert same(served.fetch(), STATE)


def test_many_strangers_are_told_once_and_have_few_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with serving(tmp_path) as served, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(served.address)) for _ in range(400)]
        assert same(served.fetch(), STATE)
        silent[0].settimeout(DEADLINE_S)
        assert silent[0].recv(1) == b"", "the first of too many"
        assert threading.active_count() - before < 400
        slow, sent = silent[-1], 0
        with contextlib.suppress(OSError):
            while not select.select([slow], [], [], 0.5)[0]:
                slow.sendall(b"x")
                sent += 1
        assert sent < 32, "a byte now and then does not make the time longer"
    assert capfd.readouterr().err.count("without its secret; further ones are refused silently") == 1


def test_what_is_changed_on_its_way_is_known(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as between, serving(tmp_path) as served:

        def pass_on(one: socket.socket) -> None:
            with one, socket.create_connection(served.address) as other:
                while ready := select.select([one, other], [], [])[0]:
                    part = ready[0].recv(1 << 16)
                    if not part:
                        return
                    # the header is shorter, and what is asked for is short
                    if ready[0] is other and len(part) > 60_000:
                        part = part[:50_000] + bytes([part[50_000] ^ 1]) + part[50_001:]
                    (other if ready[0] is one else one).sendall(part)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=pass_on, args=(between.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with pytest.raises(FileDamagedError, match="does not match its checksum"):
            served.fetch(port=between.getsockname()[1])
        between.shutdown(socket.SHUT_RDWR)


def test_only_the_blocks_that_are_needed_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a mesh needs some shards of the variables."""
    monkeypatch.setattr(state_files, "PIECE_BYTES", 1 << 16)
    whole = np.arange(4_000_000, dtype=np.float32).reshape(4, -1)
    shards = [ShardSlice("x", whole.shape, (row, 0)) for row in range(4)]
    files = [write_file(tmp_path, str(row), {"y": whole[row : row + 1]}, {"y": shards[row]}) for row in range(4)]
    sent = []

    class Counted:
        def __init__(self, content: Any) -> None:
            self._content = content

        def read_into(self, buffers: list[memoryview], offset: int) -> int:
            sent.append(self._content.read_into(buffers, offset))
            return sent[-1]

    with StateFiles.on_disk(tmp_path, files) as opened:
        counted: Any = [Counted(content) for content in opened.contents]
        with StateServer(counted, "127.0.0.1") as server:
            needed = {"x": [(slice(1, 2), slice(0, 1_000_000))]}
            state = fetch_state("127.0.0.1", server.port, server.secret, files, needed)
    assert np.array_equal(state["x"][1], whole[1])
    assert whole[1].nbytes <= sum(sent) < 1.1 * whole[1].nbytes


@pytest.mark.parametrize("chief", ["127.0.0.1:1", "nowhere.invalid:1"], ids=["connection", "store"])
def test_who_can_read_it_does_and_the_others_get_it_from_the_chief(
    tmp_path: Path, chief: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the chief cannot be reached but by the store, the store carries it."""
    store = MemoryStore()
    CheckpointStore(tmp_path).save(STATE, Progress(step=1), {})
    chief_state = ChiefState()
    given = CheckpointStore(tmp_path).load(1, chief_state.read).state
    location = chief_state.location
    assert location is not None
    fetched = []
    monkeypatch.setattr(distribution, "fetch_state", lambda *words: fetched.append(1) or fetch_state(*words))

    def act(rank: int) -> dict[str, np.ndarray]:
        peers: Any = Peers(4, rank, store, chief)
        monkeypatch.setattr(peers, "gather", lambda message, own=peers.gather: dict(enumerate(own(message))))
        mine = location if rank == 2 else replace(location, folder=str(tmp_path / "not here"))
        return share_state(peers, mine, chief_state if rank == 0 else None)

    with ThreadPoolExecutor(4) as pool:
        got = [one.result(DEADLINE_S) for one in [pool.submit(act, rank) for rank in range(4)]]
    assert got[0] is given
    assert len(fetched) == 2
    assert all(same(state, STATE) for state in got)
    assert sum(len(value) for value in store.values.values()) < 1000, "what was read is deleted"


@pytest.fixture(params=[True, False], ids=["local disk", "other disk"])
def is_local(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where checkpoints lie: the file itself is mapped, or a copy in memory."""
    monkeypatch.setattr(distribution, "is_local_disk", lambda path: request.param)
    return request.param


def test_memory_is_shared_by_all_of_one_host(tmp_path: Path, is_local: bool) -> None:
    """Each has a state of its own, whatever others do to theirs, also when the first has closed it."""
    store, chief = CheckpointStore(tmp_path), ChiefState(on_this_host=True)
    store.save(STATE, Progress(step=1), {})
    saved = store.load(1, chief.read)
    assert same(saved.state, STATE)
    location = chief.location
    assert location is not None
    assert CheckpointLocation.from_plain(json.loads(json.dumps(location.to_plain()))) == location
    assert location.mapped is not None
    assert os.path.samefile(location.mapped.path, saved.path / location.files[0].name) == is_local
    before = (saved.path / location.files[0].name).read_bytes()
    for value in saved.state.values():
        value[...] = value[..., ::-1] if value.ndim else value
    assert (saved.path / location.files[0].name).read_bytes() == before, "no array is the file"
    chief = ChiefState(on_this_host=True)
    saved = store.load(1, chief.read)
    location = chief.location
    assert location is not None
    assert location.mapped is not None
    shutil.rmtree(tmp_path)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert same(pool.submit(read_and_change, location).result(DEADLINE_S) or {}, STATE)
    mine = location.read() or {}
    mine["a/b:0"][0] = 7
    saved.state["a/b:0"][1] = 7
    assert same(location.read() or {}, STATE)
    other = replace(location.mapped, identity=(0, 0, 0))
    assert replace(location, mapped=other).read() is None, "in a container, the path may lead to another"
    chief.close()
    assert location.read() is None
    assert mine["a/b:0"][:2].tolist() == [7, 1]


@pytest.mark.parametrize("at", [3, 20, 300_000, 5_000_000, -1, None], ids=str)
@pytest.mark.usefixtures("is_local")
def test_a_damaged_file_does_not_get_into_memory(tmp_path: Path, at: int | None) -> None:
    """None: it is cut off."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        path, _ = store.save(STATE, Progress(step=step), {})
    [file] = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    if at is not None:
        data[at] ^= 1
    file.write_bytes(data if at is not None else data[:-1])
    chief = ChiefState(on_this_host=True)
    with pytest.raises(DamagedError, match=file.name):
        store.load(2, chief.read)
    saved = store.newest_good(read=chief.read)
    assert saved is not None
    assert saved.progress.step == 1
    assert same(saved.state, STATE)
    assert chief.location is not None
    assert same(chief.location.read() or {}, STATE)


def test_files_are_read_by_all_who_can(tmp_path: Path) -> None:
    chief = ChiefState()
    store = CheckpointStore(tmp_path)
    store.save(STATE, Progress(step=1), {})
    store.load(1, chief.read)
    told = chief.location
    assert told is not None
    location = CheckpointLocation.from_plain(json.loads(json.dumps(told.to_plain())))
    assert location == told
    assert same(location.read() or {}, STATE)
    path = Path(location.folder, location.files[0].name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert location.read() is None, "as it was not verified"
    path.unlink()
    assert location.read() is None
