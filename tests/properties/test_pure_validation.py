"""Validation is pure: it, `evaluate`, `predict` and exports draw nothing, change nothing, and know nothing of training.

Proven by doing it twice, and once more with what is only for training removed from the config and the model.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlaunch.base.events import EpochEnded, Event
from distlaunch.base.process import Process
from distlaunch.base.run_dir import RunDir
from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.strategies.state import State
from distlaunch.training.session import Session
from tests.properties.pure_parts import TIERS, X, Y

HERE = "tests.properties.pure_parts"
RANDOM = {"rate": 0.5}
"""Arguments of the model that only make training different."""


@st.composite
def runs(draw: Callable[[Any], Any]) -> dict[str, Any]:
    tier = draw(st.sampled_from(sorted(TIERS)))
    by_example = tier != "batches"
    return {
        "model": {"function": f"{HERE}:model", "args": {**RANDOM, "normalises": draw(st.booleans())}},
        "data": {
            "function": f"{HERE}:data",
            "args": {"tier": tier},
            "global_batch": draw(st.integers(1, 70)) if by_example else 12,
            "shuffle": draw(st.booleans()),
            "remainder": draw(st.sampled_from(["keep", "drop"])) if by_example else "keep",
            "map": draw(st.sampled_from([None, f"{HERE}:halved"])) if by_example else None,
            "augment": f"{HERE}:noisy" if by_example else None,
            "class_weight": draw(st.none() | st.just({0: 5.0, 2: 0.5})),
            "train_examples": draw(st.none() | st.integers(1, 60)),
        },
        "compile": {
            "optimizer": draw(st.sampled_from(["sgd", "adam"])),
            "loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}},
            "metrics": ["accuracy"],
        },
        "strategy": draw(st.sampled_from([{"kind": "one_device"}, {"kind": "mirrored", "replicas": 3}])),
    }


def without_training(raw: dict[str, Any]) -> dict[str, Any]:
    """The same without what is only for training."""
    plain = copy.deepcopy(raw)
    plain["model"]["args"].pop("rate")
    plain["data"].update(augment=None, class_weight=None, shuffle=False, remainder="keep")
    return plain


def session_of(raw: dict[str, Any], folder: Path, emit: Callable[[Event], None] = lambda event: None) -> Session:
    return Session.build(RunConfig.model_validate(raw), RunDir(folder), Task("worker", 0), Process(emit, lambda: False))


def seen(session: Session, folder: Path, splits: tuple[str, ...] = ("train", "validation")) -> dict[str, Any]:
    """Return the results of evaluating and predicting splits."""
    found: dict[str, Any] = {}
    for split in splits:
        found[split] = session.evaluate_checkpoint(split, None)
        session.predict(split, None, folder / f"{split}.npy")
        found[f"{split} predictions"] = np.load(folder / f"{split}.npy")
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    for name, value in ((name, expected[name]) for name in found):
        if isinstance(value, dict):
            assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
        else:
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def check(raw: dict[str, Any], *, only_validation: bool = False) -> None:
    """Compare the results of a run.

    Args:
        only_validation: look at the split for training once, and not again.
    """
    data = raw["data"]
    if data["remainder"] == "drop" and (data["train_examples"] or len(X)) < data["global_batch"]:
        return
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        session = session_of(raw, folder / "run", events.append)
        session.run_training()
        trained = session.program.snapshot()
        found = seen(session, folder)
        # while it trained, validation saw what `evaluate` sees
        [epoch] = [event for event in events if isinstance(event, EpochEnded)]
        during = {key.removeprefix("val_"): value for key, value in epoch.logs.items() if key.startswith("val_")}
        assert found["validation"] == pytest.approx(during, rel=1e-5)
        again = ("validation",) if only_validation else ("train", "validation")
        assert_same(seen(session, folder, again), found)
        assert_unchanged(session, trained)
        # the same weights in a model without random layers, on data without augmentation, weights or shuffling
        plain = session_of(without_training(raw), folder / "run")
        assert_same(seen(plain, folder, again), found, tolerance=1e-5)
        check_keras(plain.trained_model(), raw, found)
        # and training is the same where nothing is validated
        alone = session_of({**raw, "validation": None}, folder / "alone")
        alone.run_training()
        assert_unchanged(alone, trained)


def assert_unchanged(session: Session, trained: State) -> None:
    """All but the sums of metrics, which each pass begins anew."""
    now = session.program.snapshot()
    kept = [key for key in trained if key.startswith(("model/", "optimizer/"))]
    assert any("seed_generator" in key for key in kept), "the state of random layers is looked at"
    for key in kept:
        np.testing.assert_array_equal(now[key], trained[key], err_msg=key)


def check_keras(trained: keras.Model, raw: dict[str, Any], found: dict[str, Any]) -> None:
    """Return Keras's results on the arrays, with the trained weights."""
    x = X / 2 if raw["data"]["map"] else X
    trained.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    expected = trained.evaluate(x, Y, verbose=0, return_dict=True)
    assert found["validation"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(found["validation predictions"], trained.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


EVERYTHING: dict[str, Any] = {
    "model": {"function": f"{HERE}:model", "args": {**RANDOM, "normalises": True}},
    "data": {
        "function": f"{HERE}:data", "args": {"tier": "items"}, "global_batch": 13, "shuffle": True,
        "remainder": "drop", "map": f"{HERE}:halved", "augment": f"{HERE}:noisy", "class_weight": {0: 5.0, 2: 0.5},
        "train_examples": 40,
    },
    "compile": {"optimizer": "adam", "loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}},
                "metrics": ["accuracy"]},
    "strategy": {"kind": "mirrored", "replicas": 2},
}  # fmt: skip


@pytest.mark.usefixtures("virtual_devices")
def test_in_one_process() -> None:
    check(EVERYTHING, only_validation=True)


@pytest.mark.slow
@pytest.mark.usefixtures("virtual_devices")
@settings(max_examples=40)
@given(runs())
def test_in_one_process_often(raw: dict[str, Any]) -> None:
    check(raw)
