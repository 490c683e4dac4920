"""Attempts that only use what a run has trained: several at a time, beside training, on disks to be read only."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from distlaunch.base.errors import CheckpointError, RunBusyError
from distlaunch.base.event_files import EventWriter, read_run_sample
from distlaunch.base.events import Evaluated, RunEnded
from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.run_facts import RunFacts
from distlaunch.base.run_files.run_lock import lock_run
from distlaunch.checkpoints import distribution
from distlaunch.checkpoints import restorer as restorer_module
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.restorer import Restorer
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.config.run import RunConfig
from distlaunch.jobs.use import read_only_copy
from distlaunch.runs.report import attempt_report, newest_training
from distlaunch.strategies.coordination import Peers
from distlaunch.training.export.writers import staging
from tests.unit.test_peers import in_each


def save(store: CheckpointStore, step: int) -> None:
    store.save({"x": np.full((3,), step, "float32")}, Progress(step=step), {})


def run_in(folder: Path, *modes: str) -> RunDir:
    run = RunDir(folder / "job")
    run.path.mkdir()
    run.config.write_text("{}")
    for number, mode in enumerate(modes):
        run.write_json(run.attempt_plan(number), {"mode": mode, "chief": "worker:0", "tasks": []})
    return run


def test_each_launcher_gets_an_attempt_of_its_own(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    begin = threading.Barrier(8)

    def claim(_: int) -> int:
        begin.wait()
        with run.claim_attempt() as number:
            run.attempt_plan(number).touch()
        return number

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == list(range(8))


def test_a_claim_that_is_not_used_is_taken_back(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with pytest.raises(RuntimeError), run.claim_attempt():
        raise RuntimeError
    assert run.attempts() == []


def test_reports_have_the_events_of_readers(tmp_path: Path) -> None:
    run = run_in(tmp_path, "train", "evaluate", "train", "predict")
    EventWriter(run.events, attempt=0, task="worker:0").write(
        RunEnded(status="stopped", step=4, epochs_done=1, seconds=1.0)
    )
    EventWriter(run.reader_events(1), attempt=1, task="worker:0").write(
        Evaluated(step=4, split="validation", logs={"loss": 2.0})
    )
    facts = RunFacts.of(read_run_sample(run))
    assert [event.logs for event in facts.evaluations] == [{"loss": 2.0}]
    assert newest_training(run) == 2
    with run.lock():
        assert [attempt_report(run, number, facts).status for number in range(4)] == [
            *("stopped", "done", "running", "killed")
        ]
    with run.reader_lock(3):
        assert attempt_report(run, 3, facts).status == "running"
        assert not run.is_busy()


def test_a_newer_checkpoint_is_taken_if_one_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10)
    load = store.load

    def load_late(step, *read):  # type: ignore[no-untyped-def]
        if step == 10:
            save(store, 20)
            shutil.rmtree(tmp_path / "step-00000010")
        return load(step, *read)

    monkeypatch.setattr(store, "load", load_late)
    found = store.newest_good(repairs=False)
    assert found is not None
    assert found.progress.step == 20
    with pytest.raises(CheckpointError):
        load(10)  # that is what was asked for, and no other


class Reads:
    """The part of a strategy that a `Restorer` needs, in one of several processes."""

    def __init__(self, peers: Peers) -> None:
        self.is_chief, self.chief_host, self.from_chief = peers.is_chief, peers.chief_host, peers.from_chief
        self._peers = peers

    def gather(self, message: str) -> dict[str, str]:
        return dict(enumerate(self._peers.gather(message)))  # type: ignore[arg-type]

    def parts(self) -> None:
        return None


@pytest.mark.parametrize("change", ["nothing", "the chief's is deleted", "it is deleted later", "it is written again"])
@pytest.mark.parametrize("is_one_host", [True, False])
def test_all_tasks_of_a_reader_take_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, is_one_host: bool
) -> None:
    """Also those that read the files themselves, when training deletes them or writes them again meanwhile."""
    config = RunConfig.model_validate(
        {"model": {"function": "m:f"}, "data": {"function": "m:f", "global_batch": 8}, "compile": {"loss": "mse"}}
    )
    store, late = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    store.save({"x": np.full((3,), 10, "float32")}, Progress(step=10), config.to_plain())
    if not is_one_host:
        monkeypatch.setattr(distribution, "this_host", lambda: threading.current_thread().name)
        monkeypatch.setattr(restorer_module, "this_host", lambda: threading.current_thread().name)
    load, found = late.load, threading.Barrier(4)

    def newer(step: int) -> None:
        store.save({"x": np.full((3,), 20, "float32")}, Progress(step=step), config.to_plain())

    def load_late(step, *read):  # type: ignore[no-untyped-def]
        if step == 10 and change == "the chief's is deleted":
            newer(20)
            shutil.rmtree(tmp_path / "step-00000010")
        return load(step, *read)

    monkeypatch.setattr(late, "load", load_late)

    def read(peers: Peers) -> tuple[int, int, float]:
        restorer = Restorer(config, Reads(peers), late, lambda event: None)  # type: ignore[arg-type]
        progress, _ = restorer.find()
        if found.wait(60) == 0:
            if change.endswith(("later", "again")):
                shutil.rmtree(tmp_path / "step-00000010")
            if change.endswith("again"):
                newer(10)
        found.wait(60)
        return progress.step, restorer.restored_step, float(restorer.take_state()["x"][0])

    step = 20 if change.startswith("the chief") else 10
    results, _ = in_each(4, read)
    assert results == [(step, step, float(step))] * 4


def test_a_reader_repairs_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10)
    (tmp_path / "step-00000010").rename(tmp_path / ".step-00000010.before.tmp")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert store.newest_good(repairs=False) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert store.newest_good() is not None


def test_two_formats_are_exported_at_the_same_time(tmp_path: Path) -> None:
    with staging(tmp_path) as first:
        (first / "model.keras").touch()
        with staging(tmp_path) as second:
            assert first != second
        assert (first / "model.keras").exists()
    left = tmp_path / ".new_left"
    left.mkdir()
    with staging(tmp_path):
        assert not left.exists()


def test_one_process_exports_a_format(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with (
        lock_run(run.export_lock("keras")),
        lock_run(run.export_lock("tflite")),
        pytest.raises(RunBusyError),
        lock_run(run.export_lock("keras")),
    ):
        pass


def test_a_run_that_may_only_be_read(tmp_path: Path) -> None:
    run = run_in(tmp_path, "train")
    save(CheckpointStore(run.checkpoints), 10)
    EventWriter(run.events, attempt=0, task="worker:0").write(
        RunEnded(status="done", step=10, epochs_done=1, seconds=1.0)
    )
    before = sorted(str(path) for path in run.path.rglob("*"))
    with read_only_copy(run) as copy:
        assert copy.name == run.name
        assert copy.checkpoint_steps() == [10]
        assert copy.finished()
        with copy.claim_attempt() as number:
            copy.attempt_plan(number).touch()
    assert not copy.path.exists()
    assert sorted(str(path) for path in run.path.rglob("*")) == before
    if os.geteuid():
        run.attempt_plan(0).parent.parent.chmod(0o500)
        assert not run.may_be_written()
        run.attempt_plan(0).parent.parent.chmod(0o700)
