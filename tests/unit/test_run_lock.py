"""The lock of a run on disks that have locks, and on those that refuse them."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base import heartbeat
from distlaunch.base.errors import RunBusyError
from distlaunch.base.liveness import read_liveness
from distlaunch.base.run_files import run_lock
from distlaunch.base.run_files.run_lock import Owner, lock_run, lock_when_free, owner_of


@pytest.fixture(params=[None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def lock_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With locks, and without."""
    if request.param is not None:

        def refuse(fd: int, operation: int) -> None:
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(fcntl, "flock", refuse)
    return tmp_path / ".lock"


def test_a_lock_that_is_waited_for(lock_file: Path) -> None:
    told, waited = list[str](), list[float]()
    held = lock_run(lock_file)
    held.__enter__()

    def gives_up(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 2:
            held.__exit__(None, None, None)
        return False

    with lock_when_free(lock_file, "the export", told.append, gives_up):
        assert owner_of(lock_file) == Owner.here()
        with (
            pytest.raises(RunBusyError, match=f"process {os.getpid()} was still writing the export"),
            lock_when_free(lock_file, "the export", told.append, lambda seconds: True),
        ):
            pass
    assert told == [f"waiting for process {os.getpid()}, which is writing the export"] * 2
    assert len(waited) == 2
    assert owner_of(lock_file) is None


def test_one_at_a_time(lock_file: Path) -> None:
    with lock_run(lock_file):
        assert owner_of(lock_file) == Owner.here()
        with pytest.raises(RunBusyError, match=rf"still running \(process {os.getpid()}\)"), lock_run(lock_file):
            pass
    assert owner_of(lock_file) is None
    with lock_run(lock_file, notebook=True):
        assert owner_of(lock_file) == Owner.here(notebook=True)


def test_a_process_that_is_gone_holds_nothing(lock_file: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    pid = child.pid
    child.join()
    lock_file.write_text(f"{pid} {socket.gethostname()}")
    assert owner_of(lock_file) is None
    with lock_run(lock_file):
        pass


@pytest.mark.parametrize("lock_file", [errno.ENOSYS], indirect=True)
def test_a_process_of_this_host_that_lives_need_not_touch_it(lock_file: Path) -> None:
    """It is suspended, or the clock has jumped."""
    with lock_run(lock_file):
        owner = owner_of(lock_file)
        os.utime(lock_file, (1.0, 1.0))
        assert owner_of(lock_file) == owner == Owner.here()
        with pytest.raises(RunBusyError), lock_run(lock_file):
            pass


@pytest.mark.parametrize("lock_file", [errno.ENOSYS], indirect=True)
def test_a_process_with_the_number_of_one_that_is_gone_holds_nothing(lock_file: Path) -> None:
    lock_file.write_text(str(Owner.here()._replace(started=1)))
    assert owner_of(lock_file) is None
    with lock_run(lock_file):
        pass


@pytest.mark.parametrize("lock_file", [errno.ENOSYS], indirect=True)
@pytest.mark.parametrize(("age_s", "is_held"), [(0.0, True), (40.0, True), (100.0, False)])
def test_of_another_host_the_last_touch_counts(lock_file: Path, age_s: float, is_held: bool) -> None:
    lock_file.write_text("12 elsewhere")
    os.utime(lock_file, (time.time() - age_s,) * 2)
    assert owner_of(lock_file) == (Owner(12, "elsewhere") if is_held else None)
    if is_held:
        with pytest.raises(RunBusyError, match="process 12 on elsewhere"), lock_run(lock_file):
            pass
    else:
        with lock_run(lock_file):
            assert owner_of(lock_file) == Owner.here()


@pytest.mark.parametrize("lock_file", [errno.ENOSYS], indirect=True)
def test_whoever_works_touches_it(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_S", 0.001)
    with lock_run(lock_file):
        os.utime(lock_file, (1.0, 1.0))
        until = time.monotonic() + 10
        while lock_file.stat().st_mtime == 1.0:
            assert time.monotonic() < until


def test_a_disk_that_fails_is_no_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error"), lock_run(tmp_path / ".lock"):
        pass


def test_heartbeats_on_a_disk_without_files_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(heartbeat.mmap, "mmap", refuse)
    beating = heartbeat.Heartbeat(tmp_path / "heartbeat")
    beating.at_step(7)
    with beating.writing():
        liveness = read_liveness(tmp_path / "heartbeat")
    assert liveness.beats
    assert (liveness.step, liveness.writing) == (7, True)
    assert not read_liveness(tmp_path / "heartbeat").writing


def test_a_file_of_signs_that_is_just_being_made_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "heartbeat").write_bytes(bytes(heartbeat.FORMAT.size))
    assert read_liveness(tmp_path / "heartbeat").step is None
