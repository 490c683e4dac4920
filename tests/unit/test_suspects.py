"""The suspects of `verify` for a deviation, trials without them, and the first layer that deviates."""

from __future__ import annotations

import dataclasses
import math

import pytest

from distlaunch.base.run_files.trial_records import ModelFacts, Series, TrialOrder
from distlaunch.config.run import RunConfig
from distlaunch.verify.counter_trials import first_to_deviate, leaving_out, suspects
from distlaunch.verify.trials import PlannedTrial

FACTS = ModelFacts(batch_norm=["norm"], own_batch_norm=["Norm"], own_state=["layer/mean"], random=["drop", "noise"])


def planned(kind: str) -> PlannedTrial:
    strategy = {"kind": kind, "replicas": 2} if kind == "mirrored" else {"kind": kind, "mesh": {"batch": 2}}
    plain = {"model": {"function": "a:b"}, "data": {"function": "a:c", "global_batch": 8}, "strategy": strategy}
    return PlannedTrial(kind, 2, 1, RunConfig.model_validate(plain))


def reasons(kind: str, facts: ModelFacts = FACTS) -> list[str]:
    return [suspect.reason.split(":")[0] for suspect in suspects(planned(kind), facts)]


def test_only_replicas_see_a_part_of_the_batch() -> None:
    of_all = ["random layers drop, noise"]
    assert reasons("mirrored") == ["BatchNormalization norm", "class Norm", "variable layer/mean", *of_all]
    assert reasons("jax") == of_all
    assert reasons("mirrored", ModelFacts()) == []


def test_each_is_left_out_alone_or_with_others() -> None:
    found, order = suspects(planned("mirrored"), FACTS), TrialOrder(8)
    alone = [leaving_out([each], order) for each in found]
    assert [(each.synchronized, each.without) for each in alone] == [
        (True, ()),
        (False, ("Norm",)),
        (False, ("layer/mean",)),
        (False, ("drop", "noise")),
    ]
    together = leaving_out(found, order)
    assert (together.synchronized, together.without) == (True, ("Norm", "layer/mean", "drop", "noise"))


def test_an_order_reaches_the_worker_whole() -> None:
    order = TrialOrder(8, synchronized=True, without=("a", "b/c"), layers=True)
    assert TrialOrder.from_json(order.to_json()) == order
    assert hash(order) == hash(dataclasses.replace(order))


def facts(mean: float = 0.5, number: float = 100.0) -> list[float]:
    return [number, mean * number, abs(mean) * number, number, 2 * number]


def recorded(outputs: dict[str, float], gradients: dict[str, float], steps: int = 1) -> Series:
    """Steps that are all alike, of layers with these means and variables with these norms."""
    return Series(
        [{"loss": 1.0}] * steps,
        outputs=[{name: facts(mean) for name, mean in outputs.items()} for _ in range(steps)],
        variables=[gradients] * steps,
    )


OUTPUTS, GRADIENTS = {"a": 0.5, "b": 0.25, "c": 0.0}, {"a/kernel": 1.0, "b/kernel": 2.0, "b/bias": 1e-9}
REFERENCE = recorded(OUTPUTS, GRADIENTS, 2)
NOISE = [recorded({**OUTPUTS, "c": 1e-3}, {**GRADIENTS, "b/bias": 3e-9}, 2)]


def found(trial: Series) -> str:
    return first_to_deviate(trial, REFERENCE, NOISE)


def test_the_first_in_the_order_of_computation_is_named() -> None:
    trial = recorded({**OUTPUTS, "b": 0.26, "c": 9.0}, {**GRADIENTS, "a/kernel": 3.0}, 2)
    assert found(trial).endswith("the output of b, in step 1")
    trial = recorded(OUTPUTS, {**GRADIENTS, "a/kernel": 1.1, "b/kernel": 2.1}, 2)
    assert found(trial).endswith("the gradient of b/kernel, in step 1"), "computed before that of a"
    trial = recorded(OUTPUTS, GRADIENTS, 2)
    trial.outputs[1]["a"] = facts(0.6)
    assert found(trial).endswith("the output of a, in step 2")


def test_rounding_is_not_named() -> None:
    calm = "the outputs of all layers and all gradients are equal up to step 2"
    assert found(REFERENCE) == calm
    assert found(recorded({**OUTPUTS, "c": 5e-3}, {**GRADIENTS, "b/bias": 1e-8}, 2)) == calm, "noise has as much"
    assert "output of c" in found(recorded({**OUTPUTS, "c": 2e-2}, GRADIENTS, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_deviates(value: float) -> None:
    assert "the output of b" in found(recorded({**OUTPUTS, "b": value}, GRADIENTS))
    assert "the gradient of a/kernel" in found(recorded(OUTPUTS, {**GRADIENTS, "a/kernel": value}))


def test_another_number_of_values_deviates() -> None:
    trial = recorded(OUTPUTS, GRADIENTS)
    trial.outputs[0]["a"] = facts(0.5, number=101.0)
    assert found(trial).endswith("the output of a, in step 1")


def test_nothing_is_said_where_nothing_is_recorded() -> None:
    assert first_to_deviate(Series([]), Series([]), []) == ""
