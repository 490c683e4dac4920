"""How many parts a strategy makes of a global batch, from the config alone."""

from __future__ import annotations

from distlaunch.config.run import RunConfig
from distlaunch.config.strategy import DTensor, Jax, Mirrored, MultiWorkerMirrored, ParameterServer

CPU_REPLICAS = 2
"""`mirrored` with `replicas: auto`, and the size of a mesh axis that is filled, where there is no GPU."""


def shares_work(config: RunConfig) -> bool:
    """Whether `cluster.workers` counts processes that work in lockstep, each with a part of the devices."""
    return isinstance(config.strategy, MultiWorkerMirrored | DTensor | Jax)


def devices_per_worker(config: RunConfig) -> int | None:
    """Devices that each worker takes; None: its share of those there are."""
    strategy = config.strategy
    if isinstance(strategy, MultiWorkerMirrored) and isinstance(strategy.replicas_per_worker, int):
        return strategy.replicas_per_worker
    if isinstance(strategy, DTensor | Jax) and -1 not in strategy.mesh.values():
        return mesh_product(strategy) // config.cluster.num_workers
    return None


def with_workers(config: RunConfig, number: int) -> RunConfig:
    """The config with another number of workers."""
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"workers": number})})


def num_replicas(config: RunConfig, num_gpus: int | None) -> int | None:
    """Equal parts that each global batch is cut into; None where that depends on devices that are not known.

    A parameter-server step is one worker's, so its batch stays whole.
    """
    strategy = config.strategy
    if isinstance(strategy, Mirrored):
        if strategy.replicas != "auto":
            return strategy.replicas
        return None if num_gpus is None else num_gpus or CPU_REPLICAS
    if isinstance(strategy, MultiWorkerMirrored):
        workers = config.cluster.num_workers
        if strategy.replicas_per_worker != "auto":
            return workers * strategy.replicas_per_worker
        return None if num_gpus is None else workers * max(1, num_gpus // workers)
    if isinstance(strategy, DTensor | Jax):
        axis = batch_axis(strategy)
        return 1 if axis is None else mesh_size(strategy, axis, num_gpus)
    return 1


def batch_axis(strategy: DTensor | Jax) -> str | None:
    """The mesh axis that examples are split over: the input layout's first, else the axis named `batch`."""
    if strategy.input_layout is not None:
        return strategy.input_layout[0] if strategy.input_layout else None
    return "batch" if "batch" in strategy.mesh else None


def mesh_size(strategy: DTensor | Jax, axis: str, num_gpus: int | None) -> int | None:
    """Devices along an axis; None for one that is filled (-1) from devices that are not known."""
    size = strategy.mesh.get(axis, 1)
    if size != -1:
        return size if size > 0 else None
    if num_gpus == 0:
        return CPU_REPLICAS
    others = mesh_product(strategy)
    return num_gpus // others if num_gpus and others and num_gpus % others == 0 else None


def mesh_product(strategy: DTensor | Jax) -> int:
    """Devices that the mesh has, without an axis that is filled."""
    product = 1
    for size in strategy.mesh.values():
        product *= size if size > 0 else 1
    return product


def summary(config: RunConfig, num_gpus: int | None) -> str:
    """`strategy mirrored, 2 replicas, global batch 64`."""
    strategy = config.strategy
    parts = [f"strategy {strategy.kind}"]
    workers = config.cluster.num_workers
    if isinstance(strategy, MultiWorkerMirrored | ParameterServer) or workers > 1:
        parts.append(_count(workers, "worker"))
    if isinstance(strategy, ParameterServer):
        parts.append(_count(config.cluster.ps, "parameter server"))
    elif isinstance(strategy, DTensor | Jax):
        parts.append("mesh " + " x ".join(f"{axis} {size}" for axis, size in strategy.mesh.items()))
    elif isinstance(strategy, Mirrored | MultiWorkerMirrored):
        number = num_replicas(config, num_gpus)
        parts.append("replicas by devices" if number is None else _count(number, "replica"))
    parts.append(f"global batch {config.data.global_batch}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
