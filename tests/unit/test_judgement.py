"""The judgement of `verify` on recorded series: what is noise, and what is a fault."""

from __future__ import annotations

import math
import random

import pytest

from distlaunch.base.judge import Judgement, first_not_a_number, judge
from distlaunch.base.run_files.trial_records import ModelFacts, Record, Series
from distlaunch.verify.explain import explain, unexplained, weight_within_noise
from distlaunch.verify.trials import PlannedTrial

STEPS = 30
LOSSES = [1.0 / (1 + 0.1 * step) for step in range(STEPS)]


def series(factors: list[float] | None = None, *, weights: float | None = 1e-7, name: str = "loss") -> Series:
    """Losses with these relative deviations from the reference's, and gradients with the same."""
    off = factors or [0.0] * STEPS
    values = [loss * (1 + factor) for loss, factor in zip(LOSSES, off, strict=True)]
    deviations = None if weights is None else {"dense/kernel": weights}
    return Series([{name: value} for value in values], [[3 * value] for value in values], deviations)


def chaos(seed: int, start: float = 1e-7, growth: float = 1.5) -> list[float]:
    """Deviations that grow from step to step, as in a model that amplifies rounding."""
    generator = random.Random(seed)
    return [min(0.05, start * growth**step) * generator.uniform(0.3, 1.0) for step in range(STEPS)]


REFERENCE = series(weights=None)
CHAOTIC = [series(chaos(1), weights=1e-2), series(chaos(2), weights=1e-2)]
CALM = [series([1e-7] * STEPS), series([2e-7] * STEPS)]


def with_fault(factors: list[float], step: int, size: float) -> list[float]:
    return [size if number == step else factor for number, factor in enumerate(factors, 1)]


def test_equal() -> None:
    found = judge(series([3e-7] * STEPS), REFERENCE, CALM)
    assert found.equal
    assert found.first_step is None
    assert found.loss == pytest.approx(3e-7, rel=1e-3)


@pytest.mark.parametrize(("growth", "sharp_to"), [(1.0, STEPS), (2.0, 14), (1e6, 1)])
def test_equality_is_sharp_while_noise_is_small(growth: float, sharp_to: int) -> None:
    """Ten times the noise is at most 1 %: noise of 1e-7 doubles 13 times until it is 1e-3."""
    noise = series([min(1.0, 1e-7 * growth**step) for step in range(STEPS)])
    found = judge(series(), REFERENCE, [noise])
    assert (found.equal, found.sharp_to) == (True, sharp_to)


def test_chaos_is_no_fault() -> None:
    """In the end, the numbers differ by several percent, as do two runs on one device."""
    trial = series(chaos(3), weights=2e-2)
    assert max(chaos(3)) > 1e-3
    assert judge(trial, REFERENCE, CHAOTIC).equal
    assert not judge(trial, REFERENCE, CALM).equal


@pytest.mark.parametrize("noise", [CALM, CHAOTIC])
def test_a_fault_at_step_2_however_large_noise_becomes(noise: list[Series]) -> None:
    found = judge(series(with_fault(chaos(3), 2, 1e-3), weights=1e-2), REFERENCE, noise)
    assert found.first_step == 2
    assert [name for name, _ in found.losses] == ["loss"]


def test_a_small_early_fault_hides_under_no_later_noise() -> None:
    """All steps deviate by 1e-4 from the second on: far less than noise at the end, far more than at the beginning."""
    trial = series([0.0, *[1e-4] * (STEPS - 1)], weights=1e-3)
    found = judge(trial, REFERENCE, CHAOTIC)
    assert found.first_step == 2
    assert max(chaos(1)) > 1e-4


def test_a_late_fault_above_the_noise() -> None:
    found = judge(series(with_fault([1e-7] * STEPS, 25, 1e-2)), REFERENCE, CALM)
    assert found.first_step == 25


def test_weights_alone() -> None:
    found = judge(series(weights=1e-3), REFERENCE, CALM)
    assert not found.equal
    assert found.weights_differ
    assert found.first_step is None


def final(**weights: float) -> Series:
    """A run whose bias has no gradient but rounding."""
    plain = series()
    gradients = {"kernel": 1.0, "bias": 3e-9, "idle": 0.0}
    return Series(plain.logs, plain.gradients, {"kernel": 1e-7, "bias": 0.0, "idle": 0.0, **weights}, gradients)


@pytest.mark.parametrize("idle", [0.0, 2e-2])
def test_a_weight_that_rounding_moves_hides_no_other(idle: float) -> None:
    """The bias of a layer before a normalisation has no gradient; Adam makes whole steps of its rounding."""
    noise = [final(bias=0.02), final(bias=0.05)]
    found = judge(final(bias=0.3, idle=idle), final(), noise)
    assert found.equal
    assert found.worst is not None
    assert (found.worst.name, found.worst.noise, found.worst.only_rounding) == ("bias", 0.05, True)
    assert weight_within_noise(found).startswith("bias deviates by 3.0e-01, and by 5.0e-02 between runs on one device")
    assert "its gradient is only rounding (3.0e-09 in the first step" in weight_within_noise(found)
    wrong = judge(final(bias=0.3, kernel=1e-3), final(), noise)
    assert wrong.weights_differ
    assert wrong.worst is not None
    assert wrong.worst.name == "kernel"
    assert "the weight that deviates most is kernel" in unexplained(wrong, "")
    assert judge(final(bias=0.6), final(), noise).weights_differ


def test_a_weight_that_only_chaos_moves_is_named_without_another_reason() -> None:
    found = judge(final(kernel=2e-3), final(), [final(kernel=1e-3)])
    assert found.equal
    assert weight_within_noise(found).endswith("differ only in rounding: rounding errors have grown to this size")
    assert weight_within_noise(judge(final(kernel=1e-4), final(), [final(kernel=1e-3)])) == ""


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ({"loss"}, "the loss deviates from step 3 on"),
        ({"d_loss"}, "log d_loss deviates from step 3 on"),
        ({"d_loss", "psnr"}, "logs d_loss, psnr deviate from step 3 on"),
        ({"loss", "psnr"}, "the loss and log psnr deviate from step 3 on"),
        ({"psnr", "gradients"}, "log psnr and the gradients deviate from step 3 on"),
        ({"gradients"}, "the gradients deviate from step 3 on"),
    ],
    ids=range(6),  # the order of a set is another in each process of the tests
)
def test_what_deviates_is_named(off: set[str], expected: str) -> None:
    def run(off: set[str]) -> Series:
        def value(name: str, step: int) -> float:
            return 1.0 + 0.1 * step + (0.01 if name in off and step >= 3 else 0.0)

        steps = range(1, STEPS + 1)
        logs = [{name: value(name, step) for name in ("loss", "d_loss", "psnr")} for step in steps]
        return Series(logs, [[value("gradients", step)] for step in steps], {})

    found = judge(run(off), run(set()), [run(set())])
    assert unexplained(found, "").split(": ")[1] == expected
    assert {name for name, _ in found.losses} == off & {"loss", "d_loss"}


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("step", [1, 30])
def test_what_is_no_number_is_a_fault(value: float, step: int) -> None:
    found = judge(series(with_fault([0.0] * STEPS, step, value)), REFERENCE, CHAOTIC)
    assert found.first_step == step
    assert found.loss == INF


def test_no_number_in_the_weights_is_a_fault() -> None:
    for value in (NAN, INF, None):
        assert judge(series(weights=value), REFERENCE, CHAOTIC).weights_differ


def test_noise_that_is_no_number_allows_nothing() -> None:
    broken = [series([NAN] * STEPS, weights=NAN), series([INF] * STEPS, weights=INF)]
    assert judge(series([1e-7] * STEPS), REFERENCE, broken).equal
    assert not judge(series([1e-3] * STEPS), REFERENCE, broken).equal
    assert judge(series(weights=1.0), REFERENCE, broken).weights_differ


def test_a_reference_that_is_no_number() -> None:
    """Two runs that are NaN alike prove nothing."""
    broken = series(with_fault([0.0] * STEPS, 7, NAN))
    assert first_not_a_number(broken) == (7, ["the loss", "the gradients"])
    assert first_not_a_number(REFERENCE) is None
    assert not judge(broken, broken, [broken]).equal


def test_a_trial_that_ended_early_or_has_other_logs() -> None:
    short = Series(REFERENCE.logs[:20], REFERENCE.gradients[:20], {})
    assert judge(short, REFERENCE, CALM).first_step == 21
    assert judge(series(name="other"), REFERENCE, CALM).first_step == 1


ROWS = [24] * STEPS


def accuracies(flips: dict[int, float] | None = None) -> Series:
    """Hits of 24, changed in some steps."""
    hits = [12 + step % 5 for step in range(STEPS)]
    logs = [
        {"loss": loss, "accuracy": (hit + (flips or {}).get(step, 0)) / 24}
        for step, (loss, hit) in enumerate(zip(LOSSES, hits, strict=True), 1)
    ]
    return Series(logs, [], {})


def test_one_example_on_the_other_side_of_a_threshold_is_rounding() -> None:
    expected = accuracies()
    assert judge(accuracies({9: 1}), expected, [expected], ROWS).equal
    assert not judge(accuracies({9: 2}), expected, [expected], ROWS).equal
    assert not judge(accuracies({9: 0.3}), expected, [expected], ROWS).equal
    found = judge(accuracies(dict.fromkeys(range(1, 9), 1)), expected, [expected], ROWS)
    assert [name for name, _ in found.metrics] == ["accuracy"]
    assert not found.losses


def explained(trial: Series, facts: ModelFacts, kind: str = "mirrored") -> str:
    from distlaunch.config.run import RunConfig

    strategy = {"kind": kind, "replicas": 2} if kind == "mirrored" else {"kind": kind, "mesh": {"batch": 2}}
    plain = {"model": {"function": "a:b"}, "data": {"function": "a:c", "global_batch": 8}, "strategy": strategy}
    planned = PlannedTrial(kind, 2, 1, RunConfig.model_validate(plain))
    judged: Judgement = judge(trial, REFERENCE, CALM)
    assert not judged.equal
    return "; ".join(explain(planned, judged, Record(2, trial), Record(1, REFERENCE, facts, noise_source="permuted")))


def test_what_is_not_known_is_not_guessed() -> None:
    """A part of the model need not be the cause: BatchNormalization is only a suspect."""
    off = series([1e-2] * STEPS)
    facts = ModelFacts(batch_norm=["norm"], own_batch_norm=["Norm"], own_state=["layer/mean"], random=["drop"])
    assert not explained(off, facts)
    assert not explained(off, facts, "dtensor")
    assert "loss combines several examples" in explained(off, ModelFacts(mixes_rows="loss"))


def test_a_mean_over_the_local_batch_is_known_by_its_factor() -> None:
    facts = ModelFacts(own_step="mine.py:step")
    assert "2 times too large" in explained(series([1.0] * STEPS), facts)
    assert "2 times" not in explained(series([0.3] * STEPS), facts)
    # of a model's own step replicas average the gradients, so that a sum is what is known by its factor
    assert "2 times too small" in explained(series([-0.5] * STEPS), ModelFacts(own_step="Own.train_step"))
    assert "2 times" not in explained(series([1.0] * STEPS), ModelFacts(own_step="Own.train_step"))
    assert "2 times" not in explained(series([1.0] * STEPS), ModelFacts()), "Keras's own step forgets nothing"
