"""Messages between a task that trains and the process that computes its first steps on one device.

They are pickled and sent through a pipe between a process and its child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distlaunch.config.run import RunConfig
from distlaunch.data.recorded_rows import Rows
from distlaunch.strategies.protocol import Logs
from distlaunch.strategies.state import State


@dataclass(frozen=True)
class Setup:
    """The first message to the process.

    Attributes:
        config: the resolved config of the run.
        spec: structure of a batch, see `RowRecorder.spec`.
        optimizers: the optimizers of the run as they were built; see `describe_optimizers`.
        has_replicas: whether several replicas compute parts of each batch.
        on_gpu: whether the run computes on GPUs, whose results have a larger rounding error.
        memory_limit: bytes that the process may use; it ends with exit code `MEMORY_EXIT` if it needs more.
    """

    config: RunConfig
    spec: Any
    optimizers: list[dict[str, Any]]
    has_replicas: bool
    on_gpu: bool
    memory_limit: int


MEMORY_EXIT = 77


@dataclass(frozen=True)
class StepTaken:
    """A step of the run.

    Attributes:
        before, after: snapshots of the state.
        parts: the rows of the batch in their order.
        logs: the values that the run reports after the step; means since the start of the epoch.
        rows_in_epoch: number of rows that these values are computed from.
        is_first: whether it is the first step of the attempt; the settings of the optimizers are compared only at this
            step.
        built_rates: names of the optimizers whose learning rates are still those with which they were built.
    """

    before: State
    after: State
    parts: Sequence[Rows]
    logs: Logs
    rows_in_epoch: int
    is_first: bool = False
    built_rates: Sequence[str] = ()


@dataclass(frozen=True)
class BatchEvaluated:
    """The first batch of a validation; see `StepTaken`."""

    before: State
    spec: Any
    parts: Sequence[Rows]
    logs: Logs


@dataclass(frozen=True)
class Verdict:
    """The answer of the process to a step or an evaluation.

    Attributes:
        deviation: the largest relative deviation of a loss or metric.
        differences: descriptions of everything that deviates by more than rounding explains.
        known_cause: a documented reason why the numbers differ from those of one device, and what to do.
        refusal: why nothing was compared.
        reference: name of the program on one device.
        has_other_settings: whether the optimizers have other settings, which no documented reason explains.
    """

    deviation: float = 0.0
    differences: tuple[str, ...] = ()
    known_cause: str = ""
    refusal: str = ""
    reference: str = ""
    has_other_settings: bool = False

    @property
    def is_equal(self) -> bool:
        return not (self.differences or self.known_cause or self.refusal)
