"""The trials of `distlaunch verify`: each strategy and number of replicas that this machine can host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from distlaunch.config.backend import missing_backend
from distlaunch.config.checks.config import cross_check
from distlaunch.config.cluster import Cluster
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies import MODELS, REFERENCE
from distlaunch.config.strategies import Strategy as AnyStrategy

KINDS = tuple(kind for kind in MODELS if kind != REFERENCE)
REPLICAS = (2, 4)
NOT_COMPARED, CANNOT_RUN = "not compared", "cannot run"

_STRATEGY: TypeAdapter[Any] = TypeAdapter(AnyStrategy)


@dataclass(frozen=True)
class PlannedTrial:
    """A planned row of the table.

    Attributes:
        label: the strategy, with its mesh.
        verdict, reason: set if the trial is not run.
    """

    label: str
    replicas: int | None
    processes: int
    config: RunConfig
    verdict: str = ""
    reason: str = ""

    @property
    def kind(self) -> str:
        return self.config.strategy.kind


def plan_trials(config: RunConfig, kinds: Sequence[str], replicas: Sequence[int], num_gpus: int) -> list[PlannedTrial]:
    """Return the trials in the order in which they are shown."""
    planned = [
        _planned(trial_config(config, strategy, cluster), num_gpus)
        for kind in kinds
        for strategy, cluster in MODELS[kind].trials(replicas, num_gpus)
    ]
    # the strategy of the config itself, with its mesh or partitioner
    own = _planned(trial_config(config, config.strategy.model_dump(), config.cluster.model_dump()), num_gpus)
    if own.kind in kinds and not any(_is_same(own, each) for each in planned):
        planned.append(own)
    return planned


def _is_same(one: PlannedTrial, other: PlannedTrial) -> bool:
    """Return True if two trials are the same, even if different settings give their number of replicas."""

    def rest(trial: PlannedTrial) -> dict[str, Any]:
        return trial.config.strategy.model_dump(exclude={"replicas", "replicas_per_worker"})

    numbers = (one.replicas, one.processes) == (other.replicas, other.processes)
    return numbers and rest(one) == rest(other)


def reference_config(config: RunConfig, *, keeps_precision: bool = False) -> RunConfig:
    return trial_config(config, {"kind": REFERENCE}, {}, keeps_precision=keeps_precision)


def trial_config(
    config: RunConfig, strategy: dict[str, Any], cluster: dict[str, Any], *, keeps_precision: bool = False
) -> RunConfig:
    """Return the config under another strategy, without callbacks, validation and exports.

    Args:
        keeps_precision: whether it computes in the config's precision. In 16 bits, sums over parts of a batch round and
            overflow differently than sums over the whole batch.
    """
    timeouts = {name: getattr(config.cluster, name) for name in ("start_timeout_s", "stop_timeout_s")}
    # `steps_per_call` stays, because it decides how the steps of meshes are compiled
    train = config.train.model_copy(update={"callbacks": [], "epochs": 1, "log_every_steps": 1})
    if train.steps_per_epoch is None:  # parameter servers need it if the length of the data is unknown
        train = train.model_copy(update={"steps_per_epoch": 1})
    checkpoint = config.checkpoint.model_copy(
        update={"every_epochs": 1, "every_steps": None, "every_minutes": None, "every": None, "keep": 3, "best": None}
    )
    return config.model_copy(
        update={
            "strategy": _STRATEGY.validate_python(strategy),
            "cluster": Cluster.model_validate({**cluster, **timeouts, "evaluator": False, "ports": "auto"}),
            "train": train,
            "checkpoint": checkpoint,
            "validation": None,
            "export": [],
            "precision": config.precision if keeps_precision else config.precision and "float32",
            "resume": "never",
        }
    )


def _planned(config: RunConfig, num_gpus: int) -> PlannedTrial:
    strategy, cluster = config.strategy, config.cluster
    verdict, reason = _refusal(config, num_gpus)
    replicas, tasks = strategy.num_parts(cluster, num_gpus), sum(strategy.processes(cluster).values()) or 1
    return PlannedTrial(strategy.label(cluster), replicas, tasks, config, verdict, reason)


def _refusal(config: RunConfig, num_gpus: int) -> tuple[str, str]:
    """Return the verdict and reason of a trial that is not run, or empty strings."""
    if config.strategy.is_asynchronous(config.cluster):
        return NOT_COMPARED, "several workers update the variables asynchronously, in a different order in each run"
    if missing := missing_backend(config.strategy.backend):
        return CANNOT_RUN, missing
    problems = cross_check(config, num_gpus)
    return (CANNOT_RUN, "; ".join(map(str, problems))) if problems else ("", "")
