"""Which trials `distlaunch verify` makes: each strategy and number of replicas that this machine can host."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from distlaunch.config.checks.config import cross_check
from distlaunch.config.checks.replicas import num_replicas
from distlaunch.config.run import RunConfig
from distlaunch.config.strategy import Cluster, DTensor, Jax, ParameterServer
from distlaunch.config.strategy import Strategy as AnyStrategy
from distlaunch.plan.train import local_tasks

KINDS = ("mirrored", "multi_worker_mirrored", "parameter_server", "dtensor", "jax")
REPLICAS = (2, 4)
WORKERS = 2
"""Processes of a `multi_worker_mirrored` trial on GPUs, if they can share the replicas equally."""

_STRATEGY: TypeAdapter[Any] = TypeAdapter(AnyStrategy)


@dataclass(frozen=True)
class PlannedTrial:
    """One row of the table.

    Attributes:
        label: the strategy, with its mesh.
        verdict, reason: set if there is nothing to run.
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
    """The trials, in the order in which they are shown."""
    planned = [
        _planned(trial_config(config, strategy, cluster), num_gpus)
        for strategy, cluster in _strategies(kinds, replicas, num_gpus)
    ]
    own = trial_config(config, config.strategy.model_dump(), config.cluster.model_dump())
    known = [(each.config.strategy, each.config.cluster.num_workers) for each in planned]
    if config.strategy.kind in kinds and (own.strategy, own.cluster.num_workers) not in known:
        planned.append(_planned(own, num_gpus))
    return planned


def reference_config(config: RunConfig) -> RunConfig:
    return trial_config(config, {"kind": "one_device"}, {})


def trial_config(config: RunConfig, strategy: dict[str, Any], cluster: dict[str, Any]) -> RunConfig:
    """The config under another strategy, without what a trial does not do: callbacks, validation, exports, 16 bits."""
    timeouts = {name: getattr(config.cluster, name) for name in ("start_timeout_s", "stop_timeout_s")}
    train = config.train.model_copy(update={"callbacks": [], "epochs": 1, "steps_per_call": 1, "log_every_steps": 1})
    if train.steps_per_epoch is None:  # parameter servers want it where the length of the data is not known
        train = train.model_copy(update={"steps_per_epoch": 1})
    checkpoint = config.checkpoint.model_copy(update={"every_epochs": 1, "every_steps": None, "keep": 3})
    return config.model_copy(
        update={
            "strategy": _STRATEGY.validate_python(strategy),
            "cluster": Cluster(**{**cluster, **timeouts, "evaluator": False, "ports": "auto"}),
            "train": train,
            "checkpoint": checkpoint,
            "validation": None,
            "export": [],
            # with 16 bits the parts of a batch round, and overflow, otherwise than the whole of it
            "precision": config.precision and "float32",
            "resume": "never",
        }
    )


def _strategies(
    kinds: Sequence[str], replicas: Sequence[int], num_gpus: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The section `strategy` and the keys of `cluster` of each trial."""
    for kind in kinds:
        if kind == "parameter_server":
            for workers in (1, 2):
                yield {"kind": kind}, {"workers": workers, "ps": 1}
            continue
        for number in replicas:
            if kind == "mirrored":
                yield {"kind": kind, "replicas": number}, {}
            elif kind == "multi_worker_mirrored":
                # TensorFlow gives a worker without GPUs one CPU replica
                workers = WORKERS if num_gpus and number % WORKERS == 0 else number
                yield {"kind": kind, "replicas_per_worker": number // workers}, {"workers": workers}
            else:
                yield {"kind": kind, "mesh": {"batch": number}}, {}


def _planned(config: RunConfig, num_gpus: int) -> PlannedTrial:
    processes = sum(local_tasks(config).values()) or 1
    verdict, reason = _refusal(config, num_gpus)
    return PlannedTrial(_label(config), num_replicas(config, num_gpus), processes, config, verdict, reason)


def _label(config: RunConfig) -> str:
    strategy = config.strategy
    if isinstance(strategy, DTensor | Jax):
        mesh = " x ".join(f"{axis} {size}" for axis, size in strategy.mesh.items())
        return f"{strategy.kind}, {mesh}"
    if isinstance(strategy, ParameterServer):
        return f"{strategy.kind}, {config.cluster.num_workers} worker{'s' * (config.cluster.num_workers > 1)}"
    return strategy.kind


def _refusal(config: RunConfig, num_gpus: int) -> tuple[str, str]:
    """Verdict and reason of a trial that is not run."""
    if isinstance(config.strategy, ParameterServer) and config.cluster.num_workers > 1:
        return "not compared", "several workers update asynchronously, in an order that no two runs share"
    if isinstance(config.strategy, Jax) and importlib.util.find_spec("jax") is None:
        return "cannot run", "JAX is not installed: pip install 'distlaunch[jax]'"
    problems = cross_check(config, num_gpus)
    return ("cannot run", "; ".join(map(str, problems))) if problems else ("", "")
