"""The cluster that TF_CONFIG describes: whether a run is one of its tasks, and how many tasks it then has."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.cluster.spec import ClusterSpec, Task, from_tf_config
from distlaunch.config.run import RunConfig


def tf_config_cluster(config: RunConfig, environ: Mapping[str, str]) -> tuple[ClusterSpec, Task] | None:
    """The cluster that the environment says this process belongs to; None if there is none, or none is wanted.

    Raises UsageError if TF_CONFIG is malformed.
    """
    text, strategy = environ.get("TF_CONFIG"), config.strategy
    # a single process has no cluster to join, whatever the environment holds
    can_join = strategy.in_lockstep or bool(strategy.processes(config.cluster))
    return from_tf_config(text) if text and config.engine.kind == "auto" and can_join else None


def tf_config_sizes(config: RunConfig, cluster: ClusterSpec) -> dict[str, int]:
    """Return the keys of the section `cluster` that a given cluster decides, where it has other numbers of tasks."""
    if config.strategy.has_coordinator:
        given = {"workers": len(cluster.jobs.get("worker", ())), "ps": len(cluster.jobs.get("ps", ()))}
    elif config.strategy.in_lockstep:
        # a chief of TF_CONFIG trains as the workers do
        given = {"workers": sum(1 for task in cluster.tasks if task.job in ("chief", "worker"))}
    else:
        return {}
    now = {"workers": config.cluster.num_workers, "ps": config.cluster.ps}
    return {key: number for key, number in given.items() if number != now[key] and (number or key != "workers")}
