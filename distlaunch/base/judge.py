"""Judges a trial against the reference: a deviation is a fault unless the model's own rounding noise explains it.

A step may deviate by ten times the largest noise up to that step, or by 1e-5 if that is more. So the first steps, in
which noise is small, are judged strictly, however large noise becomes later. Each final weight has its own noise. For
example, the gradient of a bias before a normalization is only rounding, which Adam scales up to full steps; the large
noise of this bias must not hide deviations of other weights. NaN and infinity are always faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distlaunch.base.plural import joined, listed
from distlaunch.base.run_files.trial_records import Series

TOLERANCE, NOISE_FACTOR = 1e-5, 10.0
SHARP = 1e-2
"""If a step may deviate by more than this, relatively, its comparison proves nothing."""
_SMALLEST_SHARE = 1e-2
"""Lower limit of the values by which deviations are divided, as a fraction of the series' largest value. It is needed
because a loss may become zero."""
_FLIPS = 10
"""A metric that counts examples may differ by one example in at most one of this many steps, since rounding may move a
value across a threshold."""
ROUNDING_ALONE = 1e-6
"""A gradient below this fraction of the whole model's gradient is considered to be only rounding."""

Values = list[float]


@dataclass(frozen=True)
class WorstWeight:
    """A final weight that deviates, and how far rounding alone moves it on one device.

    Attributes:
        name: the name of its variable.
        deviation, noise: relative to the variable's largest weight.
        gradient: the norm of the variable's gradient in the first step of the reference, or None without a gradient.
        other_gradients: the same norm in the runs that differ from the reference only in rounding.
        gradients: the norm of all gradients in that step.
    """

    name: str
    deviation: float
    noise: float
    gradient: float | None = None
    other_gradients: tuple[float, ...] = ()
    gradients: float = 0.0

    @property
    def only_rounding(self) -> bool:
        """Return True if the gradient of the variable is only rounding in the first step."""
        return self.gradient is not None and self.gradient <= ROUNDING_ALONE * self.gradients


@dataclass(frozen=True)
class Judgement:
    """The judgement of a comparison; steps count from 1, deviations are relative.

    Attributes:
        first_step: the first step that deviates by more than noise explains, or None.
        loss, gradients: the largest deviation of any step, or None if there is nothing to compare.
        weights: the largest deviation of a final weight.
        worst: the variable whose deviation exceeds its allowed deviation most; if no variable exceeds it, the variable
            with the largest deviation.
        gradients_differ, weights_differ: whether they deviate by more than noise explains.
        losses, metrics: the logs that deviate by more than noise explains, with their largest deviation.
        sharp_to: the last step at which the comparison would still reveal a deviation of 1 % in the loss or in the
            gradients. After this step noise hides it.
    """

    first_step: int | None
    loss: float | None
    gradients: float | None
    weights: float | None
    worst: WorstWeight | None = None
    gradients_differ: bool = False
    weights_differ: bool = False
    losses: tuple[tuple[str, float], ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    sharp_to: int = 0

    @property
    def equal(self) -> bool:
        return not (self.losses or self.gradients_differ or self.weights_differ or self.metrics)


@dataclass(frozen=True)
class _Compared:
    """Deviations of one kind of values, step by step.

    Attributes:
        first: the first step at which the deviation is a fault, or None.
    """

    deviations: Values
    first: int | None
    sharp_to: int = 0

    @property
    def largest(self) -> float | None:
        return max(self.deviations, default=None)


def judge(trial: Series, reference: Series, noise: Sequence[Series], rows: Sequence[int] = (), *,
          tolerance: float = TOLERANCE) -> Judgement:  # fmt: skip
    """Compare the values of every step and the final weights of a trial with those of a reference.

    Args:
        noise: runs on one device that differ from the reference only in rounding.
        rows: the number of examples in each step's batch.
        tolerance: relative deviation of a loss, a metric or a gradient that is allowed in any case.
    """
    names = list(reference.logs[0]) if reference.logs else []
    losses = {name: _compare(trial, reference, noise, [_log(name)], tolerance) for name in names if is_loss(name)}
    optimizers = range(len(reference.gradients[0]) if reference.gradients and trial.gradients else 0)
    gradients = _compare(trial, reference, noise, [_gradient(index) for index in optimizers], tolerance)
    metrics: dict[str, _Compared] = {}
    for name in names:
        if name not in losses:
            compared = _compare(trial, reference, noise, [_log(name)], tolerance)
            if compared.first is not None and not _only_flips(name, trial, reference, compared, noise, rows, tolerance):
                metrics[name] = compared
    firsts = [each.first for each in (*losses.values(), gradients, *metrics.values()) if each.first is not None]
    weights = trial.weights or ({} if trial.weights is not None else {"the weights": math.inf})
    allowed = _allowed(weights, reference, noise)
    # `not <=`: NaN must not pass
    wrong = [name for name, deviation in weights.items() if not deviation <= allowed[name]]
    worst = max(wrong or weights, key=lambda name: weights[name] / (allowed[name] if wrong else 1.0), default=None)
    return Judgement(
        first_step=min(firsts, default=None),
        loss=max((each.largest or 0.0 for each in losses.values()), default=None),
        gradients=gradients.largest,
        weights=max(weights.values(), default=0.0),
        worst=None if worst is None else _worst(worst, weights[worst], reference, noise),
        gradients_differ=gradients.first is not None,
        weights_differ=bool(wrong),
        losses=tuple((name, each.largest or 0.0) for name, each in losses.items() if each.first is not None),
        metrics=tuple((name, each.largest or 0.0) for name, each in metrics.items()),
        sharp_to=max([gradients.sharp_to, *(each.sharp_to for each in losses.values())]),
    )


def _worst(name: str, deviation: float, reference: Series, noise: Sequence[Series]) -> WorstWeight:
    others = tuple(run.first_gradients[name] for run in noise if name in run.first_gradients)
    gradients = math.hypot(*reference.first_gradients.values())
    own_noise = _noise_of_weight(name, noise)
    return WorstWeight(name, deviation, own_noise, reference.first_gradients.get(name), others, gradients)


def _noise_of_weight(name: str, noise: Sequence[Series]) -> float:
    found = [run.weights[name] for run in noise if run.weights is not None and name in run.weights]
    return max((value for value in found if math.isfinite(value)), default=0.0)


def _allowed(weights: Mapping[str, float], reference: Series, noise: Sequence[Series]) -> dict[str, float]:
    """Return how far each final weight may deviate.

    A gradient that is only rounding may by chance be zero in all runs on one device. The variable then does not move
    and shows no noise, even with an optimizer like Adam. So all variables with such gradients share the largest noise
    among them.
    """
    first = reference.first_gradients
    limit = ROUNDING_ALONE * math.hypot(*first.values())
    noises = {name: _noise_of_weight(name, noise) for name in weights}
    without = {name for name in weights if name in first and first[name] <= limit}
    shared = max((noises[name] for name in without), default=0.0)
    return {name: max(TOLERANCE, NOISE_FACTOR * (shared if name in without else own)) for name, own in noises.items()}


def is_loss(name: str) -> bool:
    return "loss" in name


def spread(reference: Series, noise: Sequence[Series]) -> tuple[float, float]:
    """Return the noise of the first step and the largest noise: of the losses or, without a loss, of the gradients."""
    names = [name for name in reference.logs[0] if is_loss(name)] if reference.logs else []
    parts = [_log(name) for name in names] or [_gradient(0)]
    steps = _spread(reference, noise, parts)
    return steps[0], max(steps)


def first_not_a_number(reference: Series) -> tuple[int, list[str]] | None:
    """Return the first step with values that are not finite, and the names of these values; None if all are finite."""
    for step, logs in enumerate(reference.logs, 1):
        norms = reference.gradients[step - 1] if reference.gradients else []
        found = [log_in_words([name]) for name, value in logs.items() if not math.isfinite(value)]
        if not all(map(math.isfinite, norms)):
            found.append("the gradients")
        if found:
            return step, found
    return None


def log_in_words(names: Sequence[str]) -> str:
    """Return `the loss`, `log d_loss`, `logs d_loss, psnr`, or `the loss and log psnr`."""
    return joined(words_of_logs(names))


def words_of_logs(names: Sequence[str]) -> list[str]:
    """Return the parts of `log_in_words`, such as `the loss` and `logs d_loss, psnr`."""
    others = [name for name in names if name != "loss"]
    words = ["the loss"] if "loss" in names else []
    return [*words, *([f"log{'s' if len(others) > 1 else ''} {listed(others, 6)}"] if others else [])]


Pick = Callable[[Series], Values]


def _log(name: str) -> Pick:
    return lambda series: [logs.get(name, math.nan) for logs in series.logs]


def _gradient(index: int) -> Pick:
    return lambda series: [norms[index] if index < len(norms) else math.nan for norms in series.gradients]


def _compare(
    trial: Series, reference: Series, noise: Sequence[Series], picks: Sequence[Pick], tolerance: float
) -> _Compared:
    """Compare the picked values at each step with those of the reference."""
    if not picks:
        return _Compared([], None)
    deviations = _largest(trial, reference, picks)
    grown, first, sharp_to = 0.0, None, 0
    for step, (deviation, own_noise) in enumerate(zip(deviations, _spread(reference, noise, picks), strict=True), 1):
        grown = max(grown, own_noise)
        if NOISE_FACTOR * grown <= SHARP:
            sharp_to = step
        # `not <=` here and below: NaN must not pass
        if first is None and not deviation <= max(tolerance, NOISE_FACTOR * grown):
            first = step
    return _Compared(deviations, first, sharp_to)


def _spread(reference: Series, noise: Sequence[Series], picks: Sequence[Pick]) -> Values:
    """Return the largest noise of each step, without values that are not finite."""
    steps = [0.0] * len(reference.logs)
    for run in noise:
        found = _largest(run, reference, picks)
        steps = [max(old, new) if math.isfinite(new) else old for old, new in zip(steps, found, strict=True)]
    return steps


def _largest(series: Series, reference: Series, picks: Sequence[Pick]) -> Values:
    steps = [0.0] * len(reference.logs)
    for pick in picks:
        found = _deviations(pick(series), pick(reference))
        steps = [max(old, new) for old, new in zip(steps, found, strict=True)]
    return steps


def _deviations(own: Values, expected: Values) -> Values:
    scale = max((abs(value) for value in expected if math.isfinite(value)), default=0.0)
    # a series of zeros has no scale, so use the tolerance
    floor = scale * _SMALLEST_SHARE or TOLERANCE
    # fill a series that is too short with NaN, which counts as an infinite deviation
    own = [*own, *[math.nan] * (len(expected) - len(own))][: len(expected)]
    return [_or_inf(abs(a - b) / max(abs(b), floor)) for a, b in zip(own, expected, strict=True)]


def _or_inf(value: float | None) -> float:
    """Replace NaN by infinity; otherwise it would pass every comparison."""
    return value if value is not None and math.isfinite(value) else math.inf


def _only_flips(name: str, trial: Series, reference: Series, compared: _Compared, noise: Sequence[Series],
                rows: Sequence[int], tolerance: float) -> bool:  # fmt: skip
    """Return True if a metric that counts examples differs by single examples, in few steps."""
    expected, own = _log(name)(reference), _log(name)(trial)
    if len(rows) != len(expected):
        return False
    if not all(_whole(value * number) for value, number in zip(expected, rows, strict=True)):
        return False
    allowed = max(tolerance, NOISE_FACTOR * max(_spread(reference, noise, [_log(name)])))
    off = [step for step, deviation in enumerate(compared.deviations) if not deviation <= allowed]
    # the mean over the step's examples differs by one example
    single = all(abs(abs(own[step] - expected[step]) * rows[step] - 1) < 0.01 for step in off)
    return single and len(off) <= max(1, len(expected) // _FLIPS)


def _whole(value: float) -> bool:
    return math.isfinite(value) and abs(value - round(value)) < 0.01
