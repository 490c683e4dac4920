"""Cross-checks of `strategy:` and `cluster:`: batches divide, meshes exist, the strategy uses its cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from distlaunch.base.errors import Problem
from distlaunch.config.checks.replicas import CPU_REPLICAS, mesh_product, num_replicas, shares_work
from distlaunch.config.read.tree import Key
from distlaunch.config.read.words import did_you_mean, either, listed, show
from distlaunch.config.run import RunConfig
from distlaunch.config.strategy import (
    Cluster,
    DTensor,
    Jax,
    Mirrored,
    MultiWorkerMirrored,
    ParameterServer,
    Partitioner,
    Span,
)

_PARTITIONER_ARGS = {
    "min_size": ("min_shard_bytes", "max_shards"),
    "max_size": ("max_shard_bytes", "max_shards"),
    "fixed_shards": ("num_shards",),
}
AUTO_AXIS = "model"
"""The mesh axis over which `layout: auto` splits variables."""
_MOST_WORKERS = 1024
"""Larger numbers are not looked at for a hint; a mesh can be mistyped to any size."""
_PARTITIONER_NEEDS = {"max_size": "max_shard_bytes", "fixed_shards": "num_shards"}


def batch_divides(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Each replica gets an equal part of a full batch."""
    parts = num_replicas(config, num_gpus)
    batch = config.data.global_batch
    if parts is None or batch % parts == 0:
        return
    below = batch // parts * parts
    choices = either(str(size) for size in (below, below + parts) if size)
    yield Problem(
        ("data", "global_batch"), f"got {batch}, which {_parts(config, parts)} cannot share equally; use {choices}"
    )


def _parts(config: RunConfig, parts: int) -> str:
    if isinstance(config.strategy, MultiWorkerMirrored):
        workers = config.cluster.num_workers
        return f"{parts} replicas ({workers} workers x {parts // workers} each)" if workers > 1 else f"{parts} replicas"
    if isinstance(config.strategy, DTensor | Jax):
        return f"the batch axis of the mesh, of size {parts},"
    return f"{parts} replicas"


def devices_suffice(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """On a machine with GPUs, one for each replica. CPU devices are virtual, so there are as many as asked for."""
    strategy = config.strategy
    if not num_gpus:
        return
    if isinstance(strategy, Mirrored) and strategy.replicas != "auto" and strategy.replicas > num_gpus:
        key, needs = ("strategy", "replicas"), strategy.replicas
    elif isinstance(strategy, DTensor | Jax) and mesh_product(strategy) // config.cluster.num_workers > num_gpus:
        # whether this machine has GPUs for all workers that it starts is told when it is known which these are
        key, needs = ("strategy", "mesh"), mesh_product(strategy) // config.cluster.num_workers
    else:
        return
    message = f"needs {needs} devices, but this machine has {num_gpus} GPU(s); use at most {num_gpus}"
    yield Problem(key, f"{message}, or hide the GPUs with CUDA_VISIBLE_DEVICES=-1 to use virtual CPU devices")


def mesh_holds(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Sizes are at least 1, one may be filled; layouts name axes that exist, each once."""
    strategy = config.strategy
    if not isinstance(strategy, DTensor | Jax):
        return
    for axis, size in strategy.mesh.items():
        if size < 1 and size != -1:
            yield Problem(
                ("strategy", "mesh", axis), f"got {size}; expected a size of at least 1, or -1 to fill the axis"
            )
    filled = [axis for axis, size in strategy.mesh.items() if size == -1]
    if len(filled) > 1:
        key = ("strategy", "mesh", filled[1])
        yield Problem(key, f"got -1 for {listed(filled)}; expected it for one axis only; write the size of the others")
    product = mesh_product(strategy)
    if filled and num_gpus and num_gpus % product:
        message = f"got -1, but {num_gpus} GPUs are not divisible by the other axes' {product}; change their sizes"
        yield Problem(("strategy", "mesh", filled[0]), message)
    if strategy.layout == "auto":
        if AUTO_AXIS not in strategy.mesh:
            message = f"got 'auto', which splits variables over an axis '{AUTO_AXIS}'"
            axes = f"the mesh has {listed(strategy.mesh)}; name an axis so, or write rules"
            yield Problem(("strategy", "layout"), f"{message}; {axes}")
    else:
        for pattern, axes in strategy.layout.items():
            key = ("strategy", "layout", pattern)
            yield from _pattern(pattern, key)
            yield from _axes(axes, strategy.mesh, key)
    yield from _axes(strategy.input_layout or [], strategy.mesh, ("strategy", "input_layout"))


def _pattern(pattern: str, key: Key) -> Iterator[Problem]:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield Problem(
            key, f"not a regular expression: {error}; to match a character such as ( or + itself, write \\ before it"
        )


def _axes(axes: list[str | None], mesh: dict[str, int], key: Key) -> Iterator[Problem]:
    for index, axis in enumerate(axes):
        if axis is not None and axis not in mesh:
            message = f"got {show(axis)}, which is no axis of the mesh; expected ~ or one of {listed(mesh)}"
            yield Problem((*key, index), message + did_you_mean(axis, mesh))
    for axis, times in Counter(axis for axis in axes if axis is not None).items():
        if times > 1:
            yield Problem(
                key, f"axis '{axis}' splits {times} dimensions; expected each axis once at most; write ~ for the others"
            )


def cluster_fits(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """What `cluster:` says is what the strategy uses."""
    strategy, cluster = config.strategy, config.cluster
    is_ps = isinstance(strategy, ParameterServer)
    many = is_ps or shares_work(config)
    if cluster.num_workers > 1 and not many:
        message = f"got {cluster.num_workers}, but {strategy.kind} runs in one process; remove it"
        yield Problem(
            ("cluster", "workers"), f"{message}, or use strategy.kind: multi_worker_mirrored or parameter_server"
        )
    yield from _span(cluster, in_step=shares_work(config), kind=strategy.kind)
    yield from mesh_is_shared(config, num_gpus)
    if cluster.ps and not is_ps:
        message = f"got {cluster.ps}, but {strategy.kind} has no parameter servers; remove it"
        yield Problem(("cluster", "ps"), f"{message}, or use strategy.kind: parameter_server")
    if is_ps and not cluster.ps:
        message = "parameter_server needs at least 1 parameter server, got 0; write `ps: 1` below `cluster:`"
        yield Problem(("strategy", "kind"), message)
    if cluster.hosting == "in_process" and not is_ps:
        message = f"got 'in_process', which parameter_server alone can do, not {strategy.kind}; remove it"
        yield Problem(("cluster", "hosting"), message)
    is_mesh_of_one = isinstance(strategy, DTensor | Jax) and cluster.num_workers == 1
    yield from _ports(config, many=many and cluster.hosting == "processes" and not is_mesh_of_one)


def _span(cluster: Cluster, *, in_step: bool, kind: str) -> Iterator[Problem]:
    if not isinstance(cluster.workers, Span):
        return
    if cluster.workers.min > cluster.workers.max:
        yield Problem(
            ("cluster", "workers", "min"), f"got {cluster.workers.min}, which is more than max, {cluster.workers.max}"
        )
    if not in_step:
        key = ("cluster", "workers")
        yield Problem(key, f"a span, but the number of workers of {kind} does not change; write one number")


def mesh_is_shared(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Each worker has equally many of the mesh's devices."""
    strategy, workers = config.strategy, config.cluster.num_workers
    if not isinstance(strategy, DTensor | Jax) or any(size < 1 and size != -1 for size in strategy.mesh.values()):
        return
    devices = mesh_product(strategy)
    if -1 in strategy.mesh.values():
        if num_gpus != 0:
            return  # filled with as many GPUs as the workers can share
        devices *= CPU_REPLICAS
    if devices % workers:
        few = range(1, min(devices, _MOST_WORKERS) + 1)
        choices = either(str(number) for number in few if devices % number == 0)
        message = f"got {workers}, which cannot share the mesh's {devices} devices equally"
        yield Problem(("cluster", "workers"), f"{message}; use {choices}, or change the mesh")


def _ports(config: RunConfig, *, many: bool) -> Iterator[Problem]:
    key, ports = ("cluster", "ports"), config.cluster.ports
    if ports == "auto":
        return
    if not many:
        yield Problem(
            key, f"got {len(ports)}, but {config.strategy.kind} runs in one process and needs none; remove it"
        )
        return
    coordinators = int(isinstance(config.strategy, ParameterServer))
    workers = config.cluster.num_workers
    tasks = workers + config.cluster.ps + coordinators
    if len(ports) != tasks:
        what = f"{workers} workers" + (f", {config.cluster.ps} ps and the chief" if coordinators else "")
        yield Problem(key, f"got {len(ports)}; expected {tasks}, one for each of {what}; or write `ports: auto`")
    for port, times in Counter(ports).items():
        if times > 1:
            yield Problem((*key, _last(ports, port)), f"got {port} {times} times; each task needs a port of its own")


def _last(ports: list[int], port: int) -> int:
    return len(ports) - 1 - ports[::-1].index(port)


def partitioner_fits(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Each kind of partitioner has arguments of its own."""
    if not isinstance(config.strategy, ParameterServer) or config.strategy.partitioner is None:
        return
    partitioner = config.strategy.partitioner
    key = ("strategy", "partitioner")
    allowed = _PARTITIONER_ARGS[partitioner.kind]
    for name in Partitioner.model_fields:
        if name != "kind" and name not in allowed and getattr(partitioner, name) is not None:
            yield Problem(
                (*key, name), f"not an argument of {partitioner.kind}, which takes {listed(allowed)}; remove it"
            )
    needed = _PARTITIONER_NEEDS.get(partitioner.kind)
    if needed and getattr(partitioner, needed) is None:
        yield Problem(
            key, f"missing '{needed}', which {partitioner.kind} needs; add `{needed}: ...` below `partitioner:`"
        )


def servers_can_compile(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """XLA cannot reach variables of another process."""
    if isinstance(config.strategy, ParameterServer | DTensor) and config.compile and config.compile.jit_compile:
        message = f"got true, but XLA cannot reach the variables of {config.strategy.kind}, which lie elsewhere"
        yield Problem(("compile", "jit_compile"), f"{message}; remove it")


def scale_is_kept(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Workers that each step by themselves cannot keep one scale of the loss."""
    many = isinstance(config.strategy, ParameterServer) and config.cluster.num_workers > 1
    if many and config.precision == "mixed_float16":
        message = (
            "got 'mixed_float16', which scales the loss; several workers of parameter_server cannot keep one scale"
        )
        yield Problem(("precision",), f"{message} and one count of skipped steps; use mixed_bfloat16, or one worker")
