"""Compares the losses of a candidate with those of the untuned config, by the noise rule of `verify`."""

from __future__ import annotations

from dataclasses import replace

from distlaunch.base.judge import Judgement, judge
from distlaunch.base.run_files.trial_records import ModelFacts, Record, Series
from distlaunch.config.run import RunConfig
from distlaunch.verify.explain import named


def judge_candidate(candidate: Record, untuned: Record, reference: Record) -> Judgement:
    """Return the judgement of a candidate.

    If the untuned config gives the numbers of one device, the candidate must give them too, including the final
    weights. If it does not, for example with BatchNormalization on replicas, the losses of the candidate must equal
    those of the untuned config, within the noise of one device.

    Args:
        reference: the record of one device, with its noise.
    """
    expected, noise, rows = reference.series, reference.noise, reference.rows
    if judge(untuned.series, expected, noise, rows).equal:
        return judge(candidate.series, expected, noise, rows)
    around = [_moved(run, expected, untuned.series) for run in noise]
    base = replace(untuned.series, gradients=[], weights=None)
    return judge(replace(candidate.series, gradients=[], weights={}), base, around, rows)


def _moved(run: Series, start: Series, to: Series) -> Series:
    """Return a run that deviates from `to` as the given run deviates from `start`."""
    logs = [
        {name: to_logs.get(name, value) + run_logs.get(name, value) - value for name, value in start_logs.items()}
        for run_logs, start_logs, to_logs in zip(run.logs, start.logs, to.logs, strict=False)
    ]
    return Series(logs)


def known_causes(
    candidate: RunConfig, untuned: RunConfig, facts: ModelFacts, *, has_sparse_gradients: bool
) -> list[str]:
    """Return sentences on properties of the model that give it other losses under another strategy.

    Args:
        facts: the facts of the reference.
        has_sparse_gradients: whether one device updates only some rows of a variable.
    """
    found: list[str] = []
    if facts.batch_norm and not candidate.synchronize_batch_norm:
        what = named("BatchNormalization", facts.batch_norm)
        found.append(
            f"{what}: normalizes the rows of each replica, so that losses depend on the number of replicas; with "
            "synchronize_batch_norm: true, they do not"
        )
    if has_sparse_gradients and candidate.strategy.is_functional is not untuned.strategy.is_functional:
        what = named("Embedding", facts.embeddings) if facts.embeddings else "rows that are looked up"
        found.append(
            f"{what}: gradients are dense on a mesh, while Keras's optimizers elsewhere update only the rows that occur"
        )
    return found
