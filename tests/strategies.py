"""Settings for tests under each strategy, taken from the strategies' classes, so that a new strategy is tested too."""

from __future__ import annotations

import json
from typing import Any

from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies import MODELS, REFERENCE


def sections(kind: str, replicas: int = 2) -> dict[str, dict[str, Any]]:
    """Return the sections `strategy` and `cluster` of the first trial of `distlaunch verify`, on CPU devices."""
    strategy, cluster = next(MODELS[kind].trials((replicas,), 0), ({"kind": kind}, {}))
    return {"strategy": strategy, "cluster": cluster}


def in_one_process(kind: str, replicas: int = 2) -> dict[str, dict[str, Any]] | None:
    """Return the sections with everything in one process, or None if the strategy needs several."""
    made = sections(kind, replicas)
    if MODELS[kind].has_coordinator:
        made["cluster"] = {**made["cluster"], "hosting": "in_process"}
    section = MODELS[kind].model_validate(made["strategy"])
    return None if section.processes(Cluster.model_validate(made["cluster"])) else made


def settings(made: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Return sections as values of `--set`."""
    return tuple(f"{name}={json.dumps(section)}" for name, section in made.items())


OTHERS = tuple(kind for kind in MODELS if kind != REFERENCE)
"""The strategies that are compared with one device."""
IN_ONE_PROCESS = {kind: made for kind in MODELS if (made := in_one_process(kind)) is not None}
"""The sections of strategies that can run in one process, by kind; of two replicas."""
IN_THIS_PROCESS = tuple(
    kind for kind in IN_ONE_PROCESS if MODELS[kind].backend == "tensorflow" and not MODELS[kind].has_coordinator
)
"""The strategies that can run in a process that has run others: those without servers, on Keras's usual backend."""
WITH_REPLICAS_HERE = tuple(kind for kind in IN_THIS_PROCESS if MODELS[kind].has_replicas)
"""The strategies with several replicas in this process, each of which is traced."""
