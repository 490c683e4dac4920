"""Looks for the cause of a deviation by further trials: without each suspect, or layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from distlaunch.base.errors import DistlaunchError
from distlaunch.base.run_files.trial_records import TrialOrder
from distlaunch.verify.explain import explain, unexplained
from distlaunch.verify.first_deviation import first_to_deviate
from distlaunch.verify.run_trials import Bench, Compared
from distlaunch.verify.suspects import Suspect, leaving_out, suspects
from distlaunch.verify.trials import PlannedTrial


def causes(bench: Bench, planned: PlannedTrial, order: TrialOrder, found: Compared) -> tuple[str, ...]:
    """What a trial deviates by: causes that are sure, or where it begins.

    Args:
        order: what the trial did.
    """
    if known := explain(planned, found.judgement, found.record, found.reference):
        return known
    checks = _Checks(bench, planned, order, found)
    if sure := checks.smallest(suspects(planned, found.reference.facts)):
        return tuple(each.reason for each in sure)
    return (unexplained(found.judgement, _first_layer(bench, planned, order, found)),)


@dataclass(frozen=True)
class _Checks:
    """Repeats a trial that deviated, without suspects."""

    bench: Bench
    planned: PlannedTrial
    order: TrialOrder
    found: Compared

    def smallest(self, group: Sequence[Suspect]) -> Sequence[Suspect]:
        """Those without which the trial is equal, and none that need not be left out; empty if there are none such."""
        for each in group:
            if self._equal_without([each]):
                return [each]
        # each by itself was not enough: perhaps several together
        if len(group) < 2 or not self._equal_without(group):
            return []
        # of two, leaving out one is what was tried above
        for each in group if len(group) > 2 else ():
            fewer = [other for other in group if other is not each]
            if self._equal_without(fewer):
                group = fewer
        return group

    def _equal_without(self, group: Sequence[Suspect]) -> bool:
        without = _compared(self.bench, self.planned, leaving_out(group, self.order))
        # where noise hides the step at which it deviated, being equal shows nothing
        since = self.found.judgement.first_step or 1
        return without is not None and without.equal and without.judgement.sharp_to >= since


def _first_layer(bench: Bench, planned: PlannedTrial, order: TrialOrder, found: Compared) -> str:
    # recording layers takes a snapshot a step: no more steps than are needed
    steps = found.judgement.first_step or order.steps
    again = _compared(bench, planned, dataclasses.replace(order, steps=steps, layers=True))
    if again is None:
        return ""
    return first_to_deviate(again.record.series, again.reference.series, again.reference.noise)


def _compared(bench: Bench, planned: PlannedTrial, order: TrialOrder) -> Compared | None:
    """None if the trial cannot be made: then it shows nothing."""
    try:
        result = bench.compare(planned, order)
    except DistlaunchError:
        return None
    return result if isinstance(result, Compared) else None
