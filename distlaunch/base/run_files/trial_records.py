"""The orders of `distlaunch verify` and `tune` to a worker, and the records that the worker returns.

A trial trains a config's model for a few steps under one strategy, from given weights, and records each step. A timed
trial then waits for orders to run rounds of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distlaunch.base.plain_types import fits, is_dict
from distlaunch.base.regular_files import read_json
from distlaunch.base.run_dir import write_atomically


@dataclass(frozen=True)
class TrialOrder:
    """The order for a trial.

    Attributes:
        reference: whether this is the trial on one device, which draws the initial weights of all trials and measures
            the model's rounding noise.
        dense: whether to compare also with the reference's run with dense gradients.
        synchronized: whether BatchNormalization uses the statistics of the global batch, whatever the model sets.
        without: names of layers, classes or variables. The layers to which these names lead are called with
            `training=False`, in the trial and in its reference, to find out whether a deviation comes from them.
        layers: whether to record the output of each layer and the gradient of each variable at each step.
        timed: whether the trial leaves the model as it is, without recording gradients, and then runs rounds.
    """

    steps: int
    reference: bool = False
    dense: bool = False
    synchronized: bool = False
    without: tuple[str, ...] = ()
    layers: bool = False
    timed: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> TrialOrder:
        plain: dict[str, Any] = json.loads(text)
        plain["without"] = tuple(plain["without"])
        return TrialOrder(**plain)


@dataclass(frozen=True)
class Series:
    """The results of a run of some steps.

    Attributes:
        logs: the values of each single step.
        gradients: norm of the gradients of each step, for each optimizer; empty if unknown.
        weights: for each variable, the largest deviation of a final weight from that of the reference, relative to the
            largest weight of the variable. None for the reference.
        first_gradients: norm of each variable's gradient in the first step.
        outputs: for each step and each layer, in the order of computation, statistics of its output: number of values,
            sum, sum of magnitudes, sum of squares, sum of squared projections. Empty unless requested.
        variables: for each step, the norm of each variable's gradient, in the order of the variables. Empty unless
            requested.
    """

    logs: list[dict[str, float]]
    gradients: list[list[float]] = field(default_factory=list)
    weights: dict[str, float] | None = None
    first_gradients: dict[str, float] = field(default_factory=dict)
    outputs: list[dict[str, list[float]]] = field(default_factory=list)
    variables: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model and its data that may explain a deviation.

    Attributes:
        batch_norm: Keras layers that normalize with the statistics of the rows of their replica.
        own_batch_norm: layers of the user's classes that do the same, recognized by the names of the classes.
        embeddings: trained Embedding layers, whose gradients are sparse on one TensorFlow device.
        convolutions: convolutional layers, which XLA computes slowly on CPUs.
        random: layers that draw random numbers in training.
        own_step: the user's step function or model method that trains instead of Keras's.
        random_ops: operations of the data pipeline that draw different numbers in each process.
        own_losses: the sum of the losses that the model adds (regularization), with the initial weights.
        mixes_rows: `model` or `loss` if its results for the rows of a part of a batch differ from those for the same
            rows in the whole batch.
        own_state: variables other than weights that layers change in training.
        other_examples: True if the data pipeline gives different examples each time it is read.
    """

    batch_norm: Sequence[str] = ()
    random: Sequence[str] = ()
    own_batch_norm: Sequence[str] = ()
    embeddings: Sequence[str] = ()
    convolutions: Sequence[str] = ()
    own_step: str = ""
    random_ops: Sequence[str] = ()
    own_losses: float = 0.0
    mixes_rows: str = ""
    own_state: Sequence[str] = ()
    other_examples: bool = False


@dataclass(frozen=True)
class _Message:
    """Fields that a process writes to a file, for another process."""

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class Record(_Message):
    """The record of a trial. Only the reference has facts, rows and noise.

    Attributes:
        shards: True if the data pipeline itself takes a shard of the examples, as for one of several workers.
        rows: number of examples in each step's batch.
        noise: runs on one device that differ from the reference only in rounding.
        noise_source: `permuted` if the examples within each batch were permuted, `rounded` if the initial weights were
            changed in the last digit, or `permuted and rounded`. `none` if one device does not repeat its numbers.
        dense: for the reference, its run of the same steps with dense gradients, if it has sparse ones. For a trial,
            its own series, in which `weights` are the deviations from that run.
        examples: a checksum of the first batches.
    """

    replicas: int
    series: Series
    facts: ModelFacts = ModelFacts()
    rows: Sequence[int] = ()
    noise: Sequence[Series] = ()
    noise_source: str = ""
    shards: bool = False
    dense: Series | None = None
    examples: str = ""

    @staticmethod
    def read(path: Path) -> Record:
        """Read a record. Raise OSError or ValueError if that fails."""
        plain: dict[str, Any] = read_json(path)
        plain["series"] = Series(**plain["series"])
        plain["facts"] = ModelFacts(**plain["facts"])
        plain["dense"] = plain["dense"] and Series(**plain["dense"])
        plain["noise"] = tuple(Series(**each) for each in plain["noise"])
        return Record(**plain)


@dataclass(frozen=True)
class RoundOrder(_Message):
    """The order for a round of a timed trial. Every task of the trial reads the same file.

    Attributes:
        number: the number of the round, from 1; a task runs each number once.
        num_steps: number of timed steps; fewer if the pass over the data ends before.
        steps_per_call: number of steps in each graph call.
        untimed_steps: number of steps before those, in calls of the same length.
        checks_calls: whether to train the steps of the record again first, with calls of this length, so that the
            final weights of the record are those of such calls.
    """

    number: int
    num_steps: int
    steps_per_call: int
    untimed_steps: int
    checks_calls: bool = False

    @staticmethod
    def read(path: Path) -> RoundOrder | None:
        """Return the latest order, or None if there is none yet."""
        try:
            return RoundOrder(**read_json(path))
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class RoundResult(_Message):
    """The result of a round. The chief writes it.

    Attributes:
        number: the number of the round; 0 for the steps of the record, in calls of one step.
        step_s: mean duration of a step in seconds.
        waits: share of the time in which the chief has waited for input.
    """

    number: int
    step_s: float
    waits: float = 0.0

    @staticmethod
    def read(path: Path) -> RoundResult | None:
        """Return the latest result, or None if there is none yet. Raise ValueError if it is malformed."""
        plain = _read(path, {"number": int, "step_s": float, "waits": float})
        if plain is not None and not 0 <= plain["step_s"] < math.inf:
            raise ValueError(f"{path}: step_s: got {plain['step_s']}")
        return None if plain is None else RoundResult(**plain)


@dataclass(frozen=True)
class MemoryReport(_Message):
    """The memory of a task and its host after a round. Every task writes this report.

    Attributes:
        host: the name of the host.
        resident_bytes: resident memory of the task.
        available_bytes: memory that a new process on the host could use.
    """

    host: str
    resident_bytes: int
    available_bytes: int

    @staticmethod
    def read(path: Path) -> MemoryReport | None:
        """Return the latest report, or None if there is none yet. Raise ValueError if it is malformed."""
        plain = _read(path, {"host": str, "resident_bytes": int, "available_bytes": int})
        return None if plain is None else MemoryReport(**plain)


def _read(path: Path, kinds: Mapping[str, type]) -> dict[str, Any] | None:
    """Return the fields of a file, which may come from another host; None if there is no file."""
    try:
        plain = read_json(path)
    except FileNotFoundError:
        return None
    if not is_dict(plain) or plain.keys() != kinds.keys() or not all(fits(plain[name], kinds[name]) for name in kinds):
        raise ValueError(f"{path}: got {plain!r:.80}")
    return plain
