"""The cluster that TF_CONFIG describes: whether a command starts one of its tasks, and how many tasks it has."""

from __future__ import annotations

from distlaunch.cluster.machine import Machine
from distlaunch.cluster.spec import ClusterSpec, Task
from distlaunch.config.run import RunConfig


def joined_cluster(config: RunConfig, machine: Machine) -> tuple[ClusterSpec, Task] | None:
    """Return the cluster of TF_CONFIG, and the task of it that this command starts; None if the run joins no cluster.

    Raises:
        UsageError: TF_CONFIG is malformed.
    """
    strategy = config.strategy
    # a single process has no cluster to join, whatever the environment contains
    can_join = strategy.in_lockstep or bool(strategy.processes(config.cluster))
    return machine.tf_config if config.engine.joins_given_cluster and can_join else None


def differing_sizes(config: RunConfig, cluster: ClusterSpec) -> dict[str, int]:
    """Return the numbers of tasks of a given cluster that differ from the section `cluster`, by key."""
    if config.strategy.has_coordinator:
        given = {"workers": len(cluster.jobs.get("worker", ())), "ps": len(cluster.jobs.get("ps", ()))}
    elif config.strategy.in_lockstep:
        # a chief in TF_CONFIG trains like the workers, so it counts as one of them
        given = {"workers": sum(1 for task in cluster.tasks if task.job in ("chief", "worker"))}
    else:
        return {}
    now = {"workers": config.cluster.num_workers, "ps": config.cluster.ps}
    return {key: number for key, number in given.items() if number != now[key] and (number or key != "workers")}
