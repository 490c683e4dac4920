"""Compares the losses of a candidate with those of the untuned config, by the noise rule of `verify`."""

from __future__ import annotations

from dataclasses import replace

from distlaunch.base.judge import Judgement, judge
from distlaunch.base.run_files.trial_records import Record, Series


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
    """Return a run with the same deviations from one series as it has from another one."""
    logs = [
        {name: to_logs.get(name, value) + run_logs.get(name, value) - value for name, value in start_logs.items()}
        for run_logs, start_logs, to_logs in zip(run.logs, start.logs, to.logs, strict=False)
    ]
    return Series(logs)
