"""The comparison of the first steps with Keras on one device: correct models are equal, and planted faults are named.

The run and the reference are computed in this process; tests/processes/test_check.py has the real one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distlaunch.base.events import Event, NumbersChecked
from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.checkpoints import optimizer_changes
from distlaunch.cluster.spec import Task
from distlaunch.cluster.tf_config import IS_CHECK
from distlaunch.config.run import RunConfig
from distlaunch.data import source
from distlaunch.training import loop
from distlaunch.training.first_steps import process
from distlaunch.training.first_steps.pipe_messages import Setup, Verdict
from distlaunch.training.first_steps.process import CheckProcess
from distlaunch.training.first_steps.reference import Checker
from distlaunch.training.session import Session
from tests.parity.planted_faults import BATCH, FAULTS

HERE = "tests.parity.planted_faults"
MIRRORED = {"kind": "mirrored", "replicas": 2}


@dataclass(frozen=True)
class Recorded:
    """Messages that a run has sent to the process, and events that the run has reported by itself."""

    messages: list[tuple[Any, process.Part, Setup]]
    events: list[NumbersChecked]

    def verdicts(self, fault: str = "", **arguments: Any) -> dict[str, Verdict]:
        """The verdict on each part by its name, or with a fault in the reference, on the first step."""
        setup = self.messages[0][2]
        if fault:
            function = setup.config.model.model_copy(update={"args": {"fault": fault, "in_run": False, **arguments}})
            setup = dataclasses.replace(setup, config=setup.config.model_copy(update={"model": function}))
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(IS_CHECK, "1")
            checker = Checker(setup)
            messages = self.messages[:1] if fault else self.messages
            return {f"{part.kind} {part.step}".strip(" 0"): checker.answer(message) for message, part, _ in messages}


def record(folder: Path, **changes: Any) -> Recorded:
    """Train on two replicas, unless `changes` has another strategy."""
    sent: list[tuple[Any, process.Part, Setup]] = []
    events: list[Event] = []
    raw = {
        "name": "steps",
        "model": {"function": f"{HERE}:model", "args": changes.pop("model", {})},
        "data": {"function": f"{HERE}:data", "global_batch": BATCH, **changes.pop("data", {})},
        "train": {"epochs": 1, **changes.pop("train", {})},
        "strategy": MIRRORED,
        **changes,
    }
    task = Process(events.append, lambda: False, files=folder / "attempts" / "0" / "worker-0")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CheckProcess, "send", lambda self, *message: sent.append(message))
        session = Session.build(RunConfig.model_validate(raw), RunDir(folder), Task("worker", 0), task)
        session.run_training()
    return Recorded(sent, [event for event in events if isinstance(event, NumbersChecked)])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, virtual_devices: None) -> Recorded:
    return record(tmp_path_factory.mktemp("healthy"))


def test_a_healthy_model_is_equal(healthy: Recorded) -> None:
    assert_equal(healthy.verdicts(), "Keras")


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer"])
def test_batch_norm_of_replicas_hides_no_fault(kind: str, tmp_path: Path) -> None:
    """A step that differs is explained by BatchNormalization only if nothing else differs."""
    changes: dict[str, Any] = {"model": {"kind": kind, "synchronized": False}, "data": {"args": {"kind": kind}}}
    recorded = record(tmp_path, **changes)
    assert "write `synchronize_batch_norm: true`" in recorded.verdicts()["first 1"].known_cause
    for fault, words in FAULTS.items():
        differences = recorded.verdicts(fault, kind=kind, synchronized=False)["first 1"].differences
        assert in_reference(words) in "; ".join(differences), (fault, differences)


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
def test_batch_norm_of_replicas_explains_a_custom_loop(tmp_path: Path) -> None:
    verdict = record(tmp_path, model={"synchronized": False}, train={"loop": "custom"}).verdicts()["first 1"]
    assert (verdict.reference, verdict.differences) == ("distlaunch", ())
    assert "write `synchronize_batch_norm: true`" in verdict.known_cause


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer"])
def test_steps_in_16_bits_are_equal_and_hide_no_fault(kind: str, precision: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": precision, "model": {"kind": kind}, "data": {"args": {"kind": kind}}}
    recorded = record(tmp_path, **changes)
    unequal = {name: verdict for name, verdict in recorded.verdicts().items() if not verdict.is_equal}
    assert {name: verdict for name, verdict in unequal.items() if "have overflowed" not in verdict.known_cause} == {}
    assert not unequal or precision == "mixed_float16", "bfloat16 has the range of float32"
    found = {fault: recorded.verdicts(fault, kind=kind)["first 1"].differences for fault in FAULTS}
    missed = [fault for fault, differences in found.items() if not differences]
    assert not missed or "first 1" in unequal


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize("train", [{"loop": "custom"}, {"callbacks": [{"name": "TerminateOnNaN"}]}])
def test_a_run_in_another_way_is_equal(train: dict[str, Any], tmp_path: Path) -> None:
    assert_equal(record(tmp_path, train=train).verdicts(), "distlaunch" if "loop" in train else "Keras")


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
def test_a_learning_rate_changed_for_a_resume_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(epochs: int, rate: float) -> Verdict:
        compiled = {"optimizer": {"name": "SGD", "args": {"learning_rate": rate}}}
        changes = {"train": {"epochs": epochs}, "checkpoint": {"every_steps": 1}}
        return next(iter(record(tmp_path, compile=compiled, **changes).verdicts().values()))

    assert train(1, 0.1).is_equal
    assert train(2, 0.05).is_equal
    assert train(3, 0.05).is_equal
    # the fault: the checkpoint's rate is used
    monkeypatch.setattr(
        loop, "carry_over", lambda model, old, now, *rest: optimizer_changes.carry_over(model, old, old, *rest)
    )
    assert "the learning rate (0.05 instead of 0.025)" in train(4, 0.025).differences


def assert_equal(found: dict[str, Verdict], reference: str) -> None:
    assert list(found) == ["first 1", "first 2", "first 3", "uneven 4", "validation"]
    assert {name: verdict for name, verdict in found.items() if not verdict.is_equal} == {}
    assert max(verdict.deviation for verdict in found.values()) < 1e-6
    assert found["first 1"].reference == reference


@pytest.mark.parametrize("fault", FAULTS)
def test_a_difference_is_named(fault: str, healthy: Recorded) -> None:
    """The fault is in the reference; below, it is in the run."""
    assert in_reference(FAULTS[fault]) in "; ".join(healthy.verdicts(fault)["first 1"].differences)


def in_reference(words: str) -> str:
    """Words for a fault that is not in the run."""
    words = words.replace("RMSprop instead of Adam", "Adam instead of RMSprop").replace("(2 times", "(0.5 times")
    return words.replace("0.005 instead of 0.01", "0.01 instead of 0.005")


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path) -> None:
    found = record(tmp_path, model={"fault": fault}).verdicts()
    assert FAULTS[fault] in "; ".join(found["first 1"].differences)


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
def test_augmented_validation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    augments = {"augment": f"{HERE}:shifted"}
    plain = record(tmp_path / "a", data=augments)
    assert_equal(plain.verdicts(), "Keras")
    assert plain.events == []
    # the fault: validation data is made as training data is
    make = source.make_split
    monkeypatch.setattr(source, "make_split", lambda *args, training, **options: make(*args, training=True, **options))
    (event,) = record(tmp_path / "b", data={**augments, "shuffle": False}).events
    assert (event.status, event.part) == ("differs", "validation")
    assert "the rows (they are augmented" in event.message
