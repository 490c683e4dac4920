"""Cross-checks of `strategy:` and `cluster:`: batches divide, devices suffice, the strategy uses its cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from distlaunch.base.errors import Problem
from distlaunch.base.plural import count
from distlaunch.config.cluster import Cluster, WorkerRange
from distlaunch.config.read.words import all_of, either
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies import Strategy, kinds_that_use

_MOST_CPU_DEVICES, _MOST_TASKS = 1_024, 10_000
"""More than any machine can hold: such a number is a typo, and would fill the memory."""


def share_note(config: RunConfig, parts: int) -> str:
    """Return the cost of dividing a full batch into this many parts; empty if it costs nothing or the batch is unknown.

    Replicas weight their parts by rows, so it costs them nothing if some parts have one row more than others.
    """
    batch, strategy = config.data.global_batch, config.strategy
    if batch is None:
        return ""
    below = batch // parts * parts
    who = strategy.parts_in_words(config.cluster, parts)
    if below and (strategy.has_replicas or below == batch):
        return ""
    choices = either(str(size) for size in (below, below + parts) if size)
    cost = f"{parts - batch} have nothing to do" if strategy.has_replicas else "each device works on all of them"
    return f"data.global_batch: {who} cannot share {batch} rows equally, so {cost}; faster: {choices}"


def devices_suffice(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that a machine with GPUs has one for each replica. CPU devices are virtual, so there are many."""
    needed = config.strategy.devices_needed(config.cluster)
    if needed is None:
        return
    if not num_gpus and needed[1] > _MOST_CPU_DEVICES:
        message = f"needs {needed[1]:,} virtual CPU devices in one process; use at most {_MOST_CPU_DEVICES:,}"
        yield Problem(needed[0], message)
    if not num_gpus or needed[1] <= num_gpus:
        return
    message = f"needs {needed[1]} devices, but this machine has {count(num_gpus, 'GPU')}; use at most {num_gpus}"
    yield Problem(needed[0], f"{message}, or hide the GPUs with CUDA_VISIBLE_DEVICES=-1 to use virtual CPU devices")


def section_is_valid(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check the section with the strategy's own rules."""
    yield from config.strategy.problems(num_gpus)


def cluster_fits(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that the strategy uses what `cluster:` specifies."""
    strategy, cluster = config.strategy, config.cluster
    uses = strategy.cluster_keys
    if (cluster.num_workers > 1 or cluster.workers == "auto") and "workers" not in uses:
        why = "has a fixed number of processes" if strategy.jobs(cluster) else "runs in one process"
        got = "'auto'" if cluster.workers == "auto" else cluster.num_workers
        message = f"got {got}, but {strategy.kind} {why}; remove it"
        yield Problem(("cluster", "workers"), f"{message}, or use strategy.kind: {_users_of('workers')}")
    yield from _worker_range(strategy, cluster)
    yield from strategy.cluster_problems(cluster, num_gpus)
    if cluster.ps and "ps" not in uses:
        message = f"got {cluster.ps}, but {strategy.kind} has no parameter servers; remove it"
        yield Problem(("cluster", "ps"), f"{message}, or use strategy.kind: {_users_of('ps')}")
    if cluster.hosting == "in_process" and "hosting" not in uses:
        message = f"got 'in_process', which only {_users_of('hosting')} supports, not {strategy.kind}; remove it"
        yield Problem(("cluster", "hosting"), message)
    yield from _ports(strategy, cluster)
    if (tasks := sum(strategy.processes(cluster).values())) > _MOST_TASKS:
        key = ("cluster", "ps" if cluster.ps > cluster.num_workers else "workers")
        yield Problem(key, f"the run would have {tasks:,} processes; use at most {_MOST_TASKS:,}")


def _users_of(cluster_key: str) -> str:
    return either(kinds_that_use(cluster_key))


def _worker_range(strategy: Strategy, cluster: Cluster) -> Iterator[Problem]:
    if not isinstance(cluster.workers, WorkerRange):
        return
    if cluster.workers.min > cluster.workers.max:
        yield Problem(
            ("cluster", "workers", "min"), f"got {cluster.workers.min}, which is more than max, {cluster.workers.max}"
        )
    if not strategy.in_lockstep:
        message = f"got a range, but the number of workers of {strategy.kind} does not change; write one number"
        yield Problem(("cluster", "workers"), message)


def _ports(strategy: Strategy, cluster: Cluster) -> Iterator[Problem]:
    key, ports = ("cluster", "ports"), cluster.ports
    if ports == "auto":
        return
    processes = strategy.processes(cluster)
    if not processes and cluster.workers != "auto":
        yield Problem(key, f"got {len(ports)}, but {strategy.kind} runs in one process and needs none; remove it")
        return
    tasks = sum(processes.values())
    # the number of ports that `workers: auto` needs is known only when the hosts are known
    if len(ports) != tasks and cluster.workers != "auto":
        what = all_of(_tasks(job, number) for job, number in processes.items())
        yield Problem(key, f"got {len(ports)}; expected {tasks}, one for each of {what}; or write `ports: auto`")
    for port, times in Counter(ports).items():
        if times > 1:
            yield Problem((*key, _last(ports, port)), f"got {port} {times} times; each task needs its own port")


def _tasks(job: str, number: int) -> str:
    return f"the {job}" if job == "chief" else f"{number} {job}{'s' * (job == 'worker')}"


def _last(ports: list[int], port: int) -> int:
    return len(ports) - 1 - ports[::-1].index(port)


def variables_can_compile(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that XLA can access the variables of a step, which may be in other processes."""
    if config.compile and config.compile.jit_compile and config.strategy.refuses_jit_compile:
        why = ", whose variables are in other processes" if config.strategy.has_coordinator else ""
        message = f"got true, but XLA cannot compile a step of {config.strategy.kind}{why}; remove it"
        yield Problem(("compile", "jit_compile"), message)


def scale_is_kept(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Check that asynchronous workers do not have to share a loss scale."""
    if config.strategy.is_asynchronous(config.cluster) and config.precision == "mixed_float16":
        who = f"several workers of {config.strategy.kind}"
        message = f"got 'mixed_float16', which scales the loss; {who} cannot share one scale"
        yield Problem(("precision",), f"{message} and one count of skipped steps; use mixed_bfloat16, or one worker")
