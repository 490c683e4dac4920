"""A loss that is not finite is found at its step, under every strategy, within calls of many steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distlaunch.base.errors import NonFiniteError
from distlaunch.base.event_files import read_events
from distlaunch.base.events import CheckpointSaved, EpochEnded, Notice, RunEnded
from distlaunch.config.strategies import MODELS as KINDS
from tests.parity.nonfinite_case import BAD, STEPS, first_call
from tests.strategies import IN_ONE_PROCESS, IN_THIS_PROCESS, WITH_REPLICAS_HERE
from tests.warm import run_module

HERE = "tests.parity.nonfinite_case"
# what ends a call does not know the loop or the value: each kind has one of them in CI
CASES = [
    pytest.param(kind, value, loop, marks=pytest.mark.slow if (kind in WITH_REPLICAS_HERE) == (loop == "fit") else ())
    for value, loop in (("nan", "fit"), ("inf", "custom"))
    for kind in IN_THIS_PROCESS
]


@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize(("kind", "value", "loop"), CASES)
def test_a_call_ends_at_the_step(kind: str, value: str, loop: str) -> None:
    assert first_call(kind, value, "fail", loop) == [BAD, BAD, False]
    assert first_call(kind, value, "warn", loop) == [STEPS, BAD, False]


@pytest.mark.usefixtures("virtual_devices")
def test_a_call_ends_though_a_loss_scale_has_kept_the_weights_good() -> None:
    assert first_call("one_device", "nan", "fail", precision="mixed_float16") == [BAD, BAD, False]


@pytest.mark.parametrize(
    "kind",
    [
        # in CI test_step_loop.py looks at each end of a call on JAX
        pytest.param(kind, marks=pytest.mark.slow if kind == "jax" else ())
        for kind in IN_ONE_PROCESS
        if kind not in IN_THIS_PROCESS
    ],
)
def test_a_call_ends_at_the_step_elsewhere(kind: str) -> None:
    if kind == "jax":
        pytest.importorskip("jax")
    out = run_module(HERE, [kind], backend=KINDS[kind].backend, deadline_s=300)
    failed, warned, custom = json.loads(out.splitlines()[-1])
    assert [failed[1], warned[1], custom[1]] == [BAD] * 3
    assert [failed[2], warned[2], custom[2]] == [False] * 3
    assert warned[0] == STEPS
    assert BAD <= failed[0] <= BAD + (2 if kind == "jax" else 0)  # steps that JAX has begun already


def train(tmp_path: Path, config: dict) -> None:
    from distlaunch import notebook

    base = {"name": "run", "runs_dir": str(tmp_path), "compile": {"optimizer": "sgd", "loss": "mse"}}
    notebook.train({**base, "model": {"function": f"{HERE}:linear"}, **config})


@pytest.mark.usefixtures("virtual_devices")
def test_a_run_fails_and_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    data = {"function": f"{HERE}:spoilt", "args": {"value": "inf"}, "global_batch": 24, "shuffle": False}
    config = {"data": data, "checkpoint": {"every_steps": 5}, "train": {"steps_per_call": 4}}
    with pytest.raises(NonFiniteError, match="loss is inf in step 13, in epoch 1"):
        train(tmp_path, config)
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [5, 10]
    assert [event.status for event in events if isinstance(event, RunEnded)] == ["failed"]


@pytest.mark.usefixtures("virtual_devices")
def test_a_warned_run_goes_on_and_writes_json(tmp_path: Path) -> None:
    data = {"function": f"{HERE}:spoilt", "args": {"value": "nan"}, "global_batch": 24, "shuffle": False}
    config = {"data": data, "train": {"steps_per_call": 4, "epochs": 2, "on_nonfinite": "warn"}}
    train(tmp_path, config)
    path = tmp_path / "run" / "events.jsonl"
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    events = read_events(path)
    told = [event.message for event in events if isinstance(event, Notice)]
    assert [message.partition(" ")[0] for message in told] == ["loss", "'model/sequential/dense/kernel'"]
    losses = [event.logs["loss"] for event in events if isinstance(event, EpochEnded)]
    assert len(losses) == 2
    assert all(loss != loss for loss in losses)


def overflowing() -> dict:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(240, 12)).astype(np.float32)
    return {"train": (x, 40 * x.sum(1, keepdims=True)), "validation": (x * 1e30, x.sum(1, keepdims=True))}


@pytest.mark.usefixtures("virtual_devices")
def test_gradients_that_a_loss_scale_overflows_are_normal_and_validation_only_warns(tmp_path: Path) -> None:
    from distlaunch.checkpoints.store import CheckpointStore

    data = {"function": "tests.parity.test_nonfinite:overflowing", "global_batch": 24}
    train(tmp_path, {"data": data, "precision": "mixed_float16"})
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").newest_good()
    assert saved is not None
    [scale] = [value for name, value in saved.state.items() if "dynamic_scale" in name]
    assert scale < 2**15  # steps were skipped, and it was halved
    events = read_events(tmp_path / "run" / "events.jsonl")
    told = [event.message for event in events if isinstance(event, Notice)]
    assert told == [f"val_loss is {saved.progress.history['val_loss'][0]} in epoch 1"]
