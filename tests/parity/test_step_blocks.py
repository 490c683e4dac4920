"""Several steps of strategy `dtensor` in one call: no bit differs, and a run stops exactly where it must."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.test_step_loop import BATCH, BROKEN, NAN_STEP, STEPS, own_step, train

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.usefixtures("virtual_devices")

DATA_PARALLEL = {"kind": "dtensor", "mesh": {"batch": 2}}
SPLIT = {"kind": "dtensor", "mesh": {"batch": 2, "model": 2}, "layout": "auto"}
OWN_STEP = {"loop": "custom", "step": f"{own_step.__code__.co_filename}:own_step"}

Calls = list[int]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of two steps from the second step on; the numbers of steps of the calls."""
    from distlaunch.strategies.dtensor import feed, program

    class Counted(program.MeshFunction):
        def __call__(self, batch: Any) -> Any:
            made.append(len(batch))
            return super().__call__(batch)

    made: Calls = []
    monkeypatch.setattr(feed, "QUICK_S", 1e9)  # on a busy machine, a batch may take long
    monkeypatch.setattr(program, "MeshFunction", Counted)
    monkeypatch.setattr(program, "BLOCK_STEPS", 2)
    monkeypatch.setattr(program, "STEPS_BEFORE_BLOCKS", 1)
    monkeypatch.setattr(program, "MOST_OPERATIONS", 10_000)
    return made


@pytest.mark.parametrize(
    ("model", "strategy", "keys"),
    [
        pytest.param("thin", DATA_PARALLEL, {}, id="fit"),
        pytest.param("dense", SPLIT, {}, id="split", marks=pytest.mark.slow),
        pytest.param("dense", DATA_PARALLEL, OWN_STEP, id="own step", marks=pytest.mark.slow),
    ],
)
def test_they_change_no_bit(calls: Calls, model: str, strategy: dict[str, Any], keys: dict[str, Any]) -> None:
    blocks = train(model, [STEPS], strategy, **keys)
    # the second batch was read when no call had several steps, and the last batch of each epoch is smaller
    assert calls == [1, 1, 2, 2, 2, 1, 2, 2, 2, 2, 1]
    one_by_one = train(model, [STEPS], strategy, steps_per_call=1, **keys)
    assert calls[-STEPS:] == [1] * STEPS
    assert blocks == one_by_one


def test_trials_of_tune_do_not_wait_for_them(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlaunch.strategies.dtensor.program.STEPS_BEFORE_BLOCKS", 1000)
    train("linear", [3, 3], DATA_PARALLEL, skips_warmup=True)
    assert calls == [1, 1, 1, 2, 1]  # the first two were decided when none had several


@pytest.mark.slow  # in CI the same of strategy jax, and that training goes on if it may
def test_no_step_follows_a_loss_that_is_not_finite(calls: Calls) -> None:
    found = train("linear", [1, 8], DATA_PARALLEL, {"nan": True})
    assert (found["steps"], found["nonfinite"], found["iterations"]) == (NAN_STEP, NAN_STEP, NAN_STEP)
    assert calls == [1, 2, 2, 2, 1, 1], "the last two make the steps of the last call of two again"


def test_training_goes_on_after_a_loss_that_is_not_finite_if_it_may(calls: Calls) -> None:
    found = train("linear", [1, 7], DATA_PARALLEL, {"nan": True}, on_nonfinite="warn")
    assert (found["steps"], found["nonfinite"], found["iterations"]) == (8, NAN_STEP, 8)
    assert calls == [1, 2, 2, 2, 1]


@pytest.mark.slow  # in CI the same of strategy jax
def test_a_batch_that_cannot_be_read_fails_after_the_steps_before_it(calls: Calls) -> None:
    found = train("linear", [8], DATA_PARALLEL, {"broken": True})
    assert f"example {BROKEN}" in found["error"]
    assert found["steps"] == sum(calls) == BROKEN // BATCH


def test_a_large_step_is_a_call_of_its_own(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlaunch.strategies.dtensor.program.MOST_OPERATIONS", 10)
    train("linear", [4], DATA_PARALLEL)
    assert calls == [1] * 4
