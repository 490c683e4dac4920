"""Looks for the cause of a deviation in further trials, which leave out suspects or record every layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from distlaunch.base.errors import DistlaunchError
from distlaunch.base.judge import NOISE_FACTOR, TOLERANCE
from distlaunch.base.run_files.trial_records import ModelFacts, Series, TrialOrder
from distlaunch.verify.explain import explain, named, on_replicas, unexplained
from distlaunch.verify.run_trials import Compared, TrialRunner
from distlaunch.verify.trials import PlannedTrial

_SMALLEST_NORM = 1e-3
"""Lower limit of the norms by which deviations are divided, as a fraction of the step's largest norm. It is needed
because the gradient of a bias may consist of rounding errors only."""

T = TypeVar("T")
Triples = Iterator[tuple[str, T, T]]
Deviations = dict[str, float]


@dataclass(frozen=True)
class Suspect:
    """A possible cause.

    Attributes:
        reason: the message, with the remedy, if the trial without the suspect is equal.
        synchronized, without: the attributes of `TrialOrder` that leave the suspect out, in trial and reference.
    """

    reason: str
    synchronized: bool = False
    without: tuple[str, ...] = ()


def suspects(planned: PlannedTrial, facts: ModelFacts) -> list[Suspect]:
    """Return the suspects that this strategy and model have."""
    found: list[Suspect] = []
    if on_replicas(planned):
        if facts.batch_norm:
            reason = (
                f"{named('BatchNormalization', facts.batch_norm)}: statistics of each replica's own rows; "
                "BatchNormalization(synchronized=True) uses those of the whole batch, as on one device"
            )
            found.append(Suspect(reason, synchronized=True))
        remedy = "sum them over replicas with tf.distribute.get_replica_context().all_reduce, or train on a mesh"
        if facts.own_batch_norm:
            what = named("class", facts.own_batch_norm)
            reason = f"{what}: statistics of each replica's own rows; {remedy}"
            found.append(Suspect(reason, without=tuple(facts.own_batch_norm)))
        if facts.own_state:
            what = named("variable", facts.own_state)
            found.append(
                Suspect(
                    f"{what}: changed in training, from each replica's own rows; {remedy}",
                    without=tuple(facts.own_state),
                )
            )
    if facts.random:
        what = named("random layer", facts.random)
        reason = (
            f"{what}: different random numbers than on one device; draw them with keras.random, in a shape whose first "
            "dimension is that of the examples"
        )
        found.append(Suspect(reason, without=tuple(facts.random)))
    return found


def leaving_out(group: Sequence[Suspect], order: TrialOrder) -> TrialOrder:
    """Return the order without the suspects of a group."""
    return dataclasses.replace(
        order,
        synchronized=any(each.synchronized for each in group),
        without=tuple(name for each in group for name in each.without),
    )


def causes(runner: TrialRunner, planned: PlannedTrial, order: TrialOrder, found: Compared) -> tuple[str, ...]:
    """Return the proven causes of a deviation; if there are none, where it begins.

    Args:
        order: the order of the trial that deviates.
    """
    if known := explain(planned, found.judgement, found.record, found.reference):
        return known
    checks = _Checks(runner, planned, order, found)
    if sure := checks.smallest(suspects(planned, found.reference.facts)):
        return tuple(each.reason for each in sure)
    return (unexplained(found.judgement, _first_layer(runner, planned, order, found)),)


@dataclass(frozen=True)
class _Checks:
    """Repeats a deviating trial without some of the suspects."""

    runner: TrialRunner
    planned: PlannedTrial
    order: TrialOrder
    found: Compared

    def smallest(self, group: Sequence[Suspect]) -> Sequence[Suspect]:
        """Return a minimal group of suspects without which the trial is equal, or an empty one."""
        for each in group:
            if self._equal_without([each]):
                return [each]
        # leaving out one suspect is not enough, but leaving out several may be
        if len(group) < 2 or not self._equal_without(group):
            return []
        # with two suspects, leaving out one was tried above
        for each in group if len(group) > 2 else ():
            fewer = [other for other in group if other is not each]
            if self._equal_without(fewer):
                group = fewer
        return group

    def _equal_without(self, group: Sequence[Suspect]) -> bool:
        without = _compared(self.runner, self.planned, leaving_out(group, self.order))
        # equality proves nothing if noise hides the step at which the trial deviated
        since = self.found.judgement.first_step or 1
        return without is not None and without.equal and without.judgement.sharp_to >= since


def _first_layer(runner: TrialRunner, planned: PlannedTrial, order: TrialOrder, found: Compared) -> str:
    # recording layers takes a snapshot in each step, so only the needed steps are trained
    steps = found.judgement.first_step or order.steps
    again = _compared(runner, planned, dataclasses.replace(order, steps=steps, layers=True))
    if again is None:
        return ""
    return first_to_deviate(again.record.series, again.reference.series, again.reference.noise)


def _compared(runner: TrialRunner, planned: PlannedTrial, order: TrialOrder) -> Compared | None:
    """Return the result of a counter-trial, or None if it cannot be started or fails."""
    try:
        result = runner.compare(planned, order)
    except DistlaunchError:
        return None
    return result if isinstance(result, Compared) else None


def first_to_deviate(trial: Series, reference: Series, noise: Sequence[Series]) -> str:
    """Return a clause that names the first layer output or gradient that deviates from the reference.

    If none deviates, the clause says so. It is empty if no step was recorded.

    Within a step, outputs are compared in the order in which they are computed, then gradients, which are computed
    from the last layer to the first.

    Args:
        noise: runs on one device that differ from the reference only in rounding.
    """
    grown: dict[tuple[str, str], float] = {}
    steps = min(len(trial.variables), len(reference.variables))
    for step in range(steps):
        for what, compare in _KINDS:
            for run in noise:
                for name, value in compare(run, reference, step).items():
                    known = value if math.isfinite(value) else 0.0
                    grown[what, name] = max(grown.get((what, name), 0.0), known)
            for name, value in compare(trial, reference, step).items():
                # `not <=`: NaN deviates
                if not value <= max(TOLERANCE, NOISE_FACTOR * grown.get((what, name), 0.0)):
                    return f"the first to deviate is the {what} of {name}, in step {step + 1}"
    return f"the outputs of all layers and all gradients are equal up to step {steps}" if steps else ""


def _of_outputs(run: Series, reference: Series, step: int) -> Deviations:
    return {name: _off(own, expected) for name, own, expected in _pairs(run.outputs, reference.outputs, step)}


def _off(own: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest deviation of the statistics of an output, relative to its root mean square."""
    if own[0] != expected[0]:  # a different number of values
        return math.inf
    ours, theirs = _means(own), _means(expected)
    scale = max(theirs[2], TOLERANCE)
    deviations = [abs(one - other) / scale for one, other in zip(ours, theirs, strict=True)]
    return max(deviations) if all(map(math.isfinite, deviations)) else math.inf


def _means(facts: Sequence[float]) -> tuple[float, ...]:
    number, total, magnitudes, squares, projected = facts
    if not all(map(math.isfinite, facts)):
        return (math.nan,) * 4
    number = number or 1
    return total / number, magnitudes / number, math.sqrt(squares / number), math.sqrt(projected / number)


def _of_gradients(run: Series, reference: Series, step: int) -> Deviations:
    floor = max(reference.variables[step].values(), default=0.0) * _SMALLEST_NORM or TOLERANCE
    # gradients are computed from the last layer to the first
    pairs = reversed(list(_pairs(run.variables, reference.variables, step)))
    found = {name: abs(own - expected) / max(expected, floor) for name, own, expected in pairs}
    return {name: value if math.isfinite(value) else math.inf for name, value in found.items()}


def _pairs(run: Sequence[Mapping[str, T]], reference: Sequence[Mapping[str, T]], step: int) -> Triples[T]:
    """Yield each name that both have in a step, with both values, in the reference's order."""
    if step < len(run) and step < len(reference):
        for name, expected in reference[step].items():
            if name in run[step]:
                yield name, run[step][name], expected


_KINDS: tuple[tuple[str, Callable[[Series, Series, int], Deviations]], ...] = (
    ("output", _of_outputs),
    ("gradient", _of_gradients),
)
