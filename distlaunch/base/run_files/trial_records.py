"""The orders of `distlaunch verify` to a worker, and the worker's records. Launcher and worker share them.

A trial trains a config's model for a few steps under one strategy, from given weights, and records every step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distlaunch.base.regular_files import read_json
from distlaunch.base.run_dir import write_atomically


@dataclass(frozen=True)
class TrialOrder:
    """The order for a trial.

    Attributes:
        reference: draws the weights that all others start from, and measures the model's own rounding noise.
        dense: compares with the reference's run with dense gradients, too.
        synchronized: BatchNormalization takes the statistics of the whole batch, whatever the model says.
        without: layers, classes or variables; the layers that they name are called with `training=False`. In both the
            trial and its reference this shows whether a deviation comes from there.
        layers: records what each layer puts out, and each variable's gradient, at every step.
    """

    steps: int
    reference: bool = False
    dense: bool = False
    synchronized: bool = False
    without: tuple[str, ...] = ()
    layers: bool = False

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
        logs: the values of each step alone.
        gradients: norm of the gradients of each step, one for each optimizer; empty if not known.
        weights: for each variable the largest deviation of a final weight from the reference's, relative to the
            variable's largest; None for the reference.
        first_gradients: norm of each variable's gradient in the first step.
        outputs: of each step, what each layer put out, in the order in which they are computed: number of values, sum,
            sum of magnitudes, sum of squares, sum of squared projections; empty unless asked for.
        variables: of each step, the norm of each variable's gradient, in the order of the variables; empty unless
            asked for.
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
        batch_norm: layers that normalise by their replica's rows.
        own_batch_norm: the same, but not Keras's: classes that are called so.
        embeddings: trained Embedding layers, whose gradients are sparse on one TensorFlow device.
        random: layers that draw random numbers in training.
        own_step: the step function, or the model's method, that trains instead of Keras's.
        random_ops: operations of the data pipeline that draw other numbers in each process.
        own_losses: the sum of the losses that the model adds (regularisation), with the first weights.
        mixes_rows: `model` or `loss`: what computes something else for a part of a batch than for the same rows of the
            whole.
        own_state: other variables than weights that the layers change in training.
        other_examples: the data pipeline gives other examples each time it is read.
    """

    batch_norm: Sequence[str] = ()
    random: Sequence[str] = ()
    own_batch_norm: Sequence[str] = ()
    embeddings: Sequence[str] = ()
    own_step: str = ""
    random_ops: Sequence[str] = ()
    own_losses: float = 0.0
    mixes_rows: str = ""
    own_state: Sequence[str] = ()
    other_examples: bool = False


@dataclass(frozen=True)
class Record:
    """The record of a trial. Facts, rows and noise are the reference's.

    Attributes:
        shards: the data pipeline takes a part of the examples by itself, as for one of several workers.
        rows: examples of each step's batch.
        noise: runs on one device that differ in rounding only.
        noise_source: `permuted`: the examples within each batch; `rounded`: the first weights in their last digit; or
            both; `none`: one device does not repeat its own numbers, so nobody can say.
        dense: the reference's: the same steps with dense gradients, if it has others; a trial's: its own series,
            compared with that.
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

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(path: Path) -> Record:
        """Read a record. Raise OSError or ValueError if that fails."""
        plain: dict[str, Any] = read_json(path)
        plain["series"] = Series(**plain["series"])
        plain["facts"] = ModelFacts(**plain["facts"])
        plain["dense"] = plain["dense"] and Series(**plain["dense"])
        plain["noise"] = tuple(Series(**each) for each in plain["noise"])
        return Record(**plain)
