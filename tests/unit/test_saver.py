"""Checkpoints beside training: who waits for whom, and where errors of the thread come out."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from distlaunch.base.errors import CheckpointWriteError, NonFiniteError
from distlaunch.base.events import CheckpointFailed, CheckpointSaved, Event
from distlaunch.base.process import Process
from distlaunch.checkpoints import throttle
from distlaunch.checkpoints.best import BestEpoch
from distlaunch.checkpoints.meta import Progress
from distlaunch.checkpoints.policy import SaveDecision
from distlaunch.checkpoints.saver import Saver
from distlaunch.checkpoints.store import CheckpointStore
from distlaunch.config.run import RunConfig
from distlaunch.training.checks.nonfinite import NonFinite

pytestmark = pytest.mark.usefixtures("virtual_devices")
LIMIT_S = 30


class Disk(CheckpointStore):
    """Writes when the gate is open. Steps in `full` find no room."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate, self.reached, self.full = threading.Event(), threading.Event(), set()

    def save(self, state: Any, progress: Progress, config: Any, *, best: bool = False, throttle: Any = None) -> Any:
        self.reached.set()
        assert self.gate.wait(LIMIT_S)
        if progress.step in self.full:
            raise OSError(28, "No space left on device")
        return super().save(state, progress, config, best=best, throttle=throttle)


class Rig:
    """A saver, and all events that it emits."""

    def __init__(self, folder: Path, *, beside: bool = True) -> None:
        self.disk, self.events, self.flags = Disk(folder), [], []
        self.values = np.ones(3, np.float32)
        config = RunConfig.model_validate(
            {"model": {"function": "a:b"}, "data": {"function": "a:b", "global_batch": 1},
             "compile": {"optimizer": "sgd", "loss": "mse"}, "checkpoint": {"async": beside}}
        )  # fmt: skip
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, name="d")])
        model.stop_training = False
        [self.name, *_] = [f"model/{variable.path}" for variable in model.variables]
        self.stop, self.now = threading.Event(), 0.0
        process = Process(
            self.events.append, lambda: False, writing=lambda: self._flag("writing"),
            saving=lambda: self._flag("saving"), is_stopping=self.stop.is_set, clock=lambda: self.now,
        )  # fmt: skip
        self.saver = Saver(
            config, model, [], process, self.disk, is_chief=True, best=BestEpoch(None), policy=SaveDecision([]),
            on_nonfinite=NonFinite("fail", self.events.append).state,
        )  # fmt: skip
        self.saver.__enter__()

    @contextmanager
    def _flag(self, name: str) -> Iterator[None]:
        self.flags.append(name)
        yield
        self.flags.remove(name)

    def snapshot(self) -> dict[str, np.ndarray]:
        return {self.name: self.values.copy()}

    def save(self, step: int, **how: Any) -> None:
        self.saver.save(self, Progress(step=step), **how)  # type: ignore[arg-type]

    def end(self, error: BaseException | None = None) -> None:
        self.saver.__exit__(None if error is None else type(error), error, None)

    def wait(self) -> None:
        until = time.monotonic() + LIMIT_S
        while not self.saver.is_idle:
            assert time.monotonic() < until

    def told(self, kind: type[Event]) -> list[int]:
        return [event.step for event in self.events if isinstance(event, kind)]  # type: ignore[attr-defined]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.disk.gate.set()
    with contextlib.suppress(Exception):  # which a failed test has left
        made.end()


def test_training_goes_on_with_a_copy(rig: Rig) -> None:
    rig.save(5)
    assert rig.disk.reached.wait(LIMIT_S)
    assert rig.flags == ["writing"]
    rig.saver.check()
    rig.values[:] = 7
    assert rig.disk.steps() == []
    rig.now = 2.0
    rig.disk.gate.set()
    rig.end()
    assert rig.disk.load(5).state[rig.name].tolist() == [1, 1, 1]
    [saved] = rig.events
    assert (saved.step, saved.num_bytes > 12, rig.flags) == (5, True, [])
    assert (saved.stalled_s, saved.seconds) == (0.0, 2.0)


def test_the_next_save_waits_before_it_copies(rig: Rig) -> None:
    rig.save(5)
    second = threading.Thread(target=rig.save, args=(6,), daemon=True)
    second.start()
    while rig.flags != ["writing", "saving"]:  # it tells that training waits
        assert second.is_alive()
    rig.values[:] = 7
    rig.disk.gate.set()
    second.join(LIMIT_S)
    rig.end()
    assert rig.disk.load(5).state[rig.name].tolist() == [1, 1, 1]
    assert rig.disk.load(6).state[rig.name].tolist() == [7, 7, 7]
    assert rig.told(CheckpointSaved) == [5, 6]


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece that a thread writes seems to take it an hour, so that it rests for hours."""
    hours = itertools.count(step=3600)
    monkeypatch.setattr(throttle.time, "thread_time", lambda: float(next(hours)))


@pytest.mark.usefixtures("long_rests")
@pytest.mark.parametrize("who", ["next save", "end", "failure", "own thread"])
def test_who_waits_ends_the_rests_of_the_thread(rig: Rig, who: str) -> None:
    rig.disk.gate.set()
    rig.now = 300.0
    rig.save(5, wait=who == "own thread")
    if who == "next save":
        rig.save(6)
    rig.end(RuntimeError() if who == "failure" else None)
    assert rig.told(CheckpointSaved) == [5, 6] if who == "next save" else [5]


@pytest.mark.usefixtures("long_rests")
def test_a_process_that_is_to_stop_has_no_rests(rig: Rig) -> None:
    rig.stop.set()
    rig.disk.gate.set()
    rig.now = 300.0
    rig.save(5)
    rig.wait()
    assert rig.told(CheckpointSaved) == [5]


@pytest.mark.usefixtures("long_rests")
def test_there_are_rests_for_a_third_of_the_time_between_saves(rig: Rig) -> None:
    rig.disk.gate.set()
    rig.save(5)
    rig.wait()  # no time has passed
    assert rig.told(CheckpointSaved) == [5]
    rig.now = 900.0
    rig.save(6)
    rig.now = 1199.0
    rig.saver.check()
    assert rig.told(CheckpointSaved) == [5]
    rig.end()
    assert rig.told(CheckpointSaved) == [5, 6]


@pytest.mark.parametrize("beside", [True, False])
def test_whoever_asks_for_it_waits_for_the_commit(tmp_path: Path, beside: bool) -> None:
    rig = Rig(tmp_path, beside=beside)
    rig.disk.gate.set()
    rig.save(5, wait=beside)
    assert rig.disk.steps() == [5]
    [saved] = rig.events
    assert saved.stalled_s >= saved.seconds
    rig.end()


def test_training_that_fails_waits_for_the_commit(rig: Rig) -> None:
    rig.save(5)
    ending = threading.Thread(target=rig.end, args=(RuntimeError("mine"),), daemon=True)
    ending.start()
    rig.disk.gate.set()
    ending.join(LIMIT_S)
    assert rig.told(CheckpointSaved) == [5]


def test_a_full_disk_fails_the_last_checkpoint_only(rig: Rig) -> None:
    rig.disk.full = {5, 6}
    rig.disk.gate.set()
    rig.save(5)
    with pytest.raises(CheckpointWriteError, match="of step 6, cannot be written: No space left"):
        rig.save(6, otherwise=None, wait=True)
    assert rig.told(CheckpointFailed) == [5]
    assert rig.events[0].reason == "not written: No space left on device; training continues"
    rig.end()


def test_a_bad_state_fails_training_at_its_next_look(rig: Rig) -> None:
    rig.disk.gate.set()
    rig.save(4)
    rig.values[1] = np.nan
    rig.save(5)
    with pytest.raises(NonFiniteError, match="is not finite after step 5"):
        rig.save(6)
    assert rig.disk.steps() == [4]
    rig.end()


def test_a_bad_state_is_what_training_failed_of(rig: Rig) -> None:
    """The bad state is older than the bad loss of a later step."""
    rig.values[1] = np.inf
    rig.save(5)
    rig.disk.gate.set()
    with pytest.raises(NonFiniteError, match="is not finite after step 5"):
        rig.end(NonFiniteError("loss is nan in step 7"))
    assert rig.told(CheckpointSaved) == []
