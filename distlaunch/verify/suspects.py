"""What in a model may make a trial deviate, and how to leave it out, so that a cause is named only if it is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from distlaunch.base.run_files.trial_records import ModelFacts, TrialOrder
from distlaunch.verify.explain import named, on_replicas
from distlaunch.verify.trials import PlannedTrial


@dataclass(frozen=True)
class Suspect:
    """A possible cause.

    Attributes:
        reason: what to say if the trial without it is equal, with the remedy.
        synchronized, without: as of `TrialOrder`: what leaves it out, in the trial and in its reference.
    """

    reason: str
    synchronized: bool = False
    without: tuple[str, ...] = ()


def suspects(planned: PlannedTrial, facts: ModelFacts) -> list[Suspect]:
    """Those that this strategy and this model have."""
    found = []
    if on_replicas(planned):
        if facts.batch_norm:
            reason = (
                f"{named('BatchNormalization', facts.batch_norm)}: statistics of each replica's own rows; "
                "BatchNormalization(synchronized=True) takes those of the whole batch, as on one device"
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
                    f"{what}: changed in training, by each replica's own rows; {remedy}", without=tuple(facts.own_state)
                )
            )
    if facts.random:
        what = named("random layer", facts.random)
        reason = (
            f"{what}: other random numbers than on one device; draw them by keras.random, with the examples in the "
            "first dimension"
        )
        found.append(Suspect(reason, without=tuple(facts.random)))
    return found


def leaving_out(group: Sequence[Suspect], order: TrialOrder) -> TrialOrder:
    """The order without the suspects of a group."""
    return dataclasses.replace(
        order,
        synchronized=any(each.synchronized for each in group),
        without=tuple(name for each in group for name in each.without),
    )
