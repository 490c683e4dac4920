"""The hosts and devices on which `distlaunch tune` measures: this machine, or hosts of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from distlaunch.cluster.hardware import Hardware
from distlaunch.cluster.spec import Place
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Needs
from distlaunch.engines.context import LaunchContext
from distlaunch.jobs.attempt import allocate_fitting, count_workers, min_workers


@dataclass(frozen=True)
class Site:
    """The hosts and devices for candidates.

    Attributes:
        hardware: facts that hold on all hosts; see `common_hardware`.
        gpus: the number of GPUs of each host.
        hosts: the names of the hosts; empty for this machine.
        slots: for each host, the maximum number of workers; empty without a limit.
        num_workers: the number of workers of the untuned config.
        notes: messages of the engine about the hosts.
    """

    hardware: Hardware
    gpus: tuple[int, ...] = (0,)
    hosts: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    num_workers: int = 1
    notes: tuple[str, ...] = ()

    @property
    def is_cluster(self) -> bool:
        """Return True if candidates can use several hosts."""
        return len(self.hosts) > 1

    @property
    def worker_counts(self) -> list[int]:
        """Return the numbers of workers with which a candidate uses all hosts, the largest first."""
        # hosts are filled in order, so fewer workers would leave out the last host
        least = sum(self.slots[:-1]) + 1
        return sorted({sum(self.slots), *({self.num_workers} if self.num_workers >= least else ())}, reverse=True)

    def num_gpus_for(self, config: RunConfig) -> int:
        """Return the number of GPUs that the tasks of a config can use: those of its hosts."""
        return sum(self.gpus) if sum(config.strategy.processes(config.cluster).values()) > 1 else self.gpus[0]

    def workers_per_host(self, config: RunConfig) -> int:
        """Return the largest number of workers of a config on one host."""
        workers = config.strategy.processes(config.cluster).get("worker", 1)
        return min(workers, max(self.slots, default=workers))

    @staticmethod
    def of(config: RunConfig, context: LaunchContext) -> Site:
        """Return the site of a config. The engine of the context must be entered.

        Raises:
            ConfigError: not even one worker fits the config.
            UsageError: a host cannot be used, or the hosts have too few slots.
        """
        machine, engine = context.machine, context.engine
        counted = count_workers(config, context)
        counted = counted.with_workers(counted.cluster.num_workers)
        if engine.uses_this_machine_only:
            return Site(machine.hardware, (len(machine.gpus),), num_workers=counted.cluster.num_workers)
        # reports hosts that cannot be used, and a config that needs more slots than there are
        fitting, own = allocate_fitting(counted, context, min_workers(config))
        own.release()
        slots = engine.count_slots()
        every = engine.allocate(Needs(slots, slots, {"worker": slots}))
        every.release()
        names = hosts_of(config, own.places, every.places)
        return site_at([place for place in every.places if place.host in names], fitting.cluster.num_workers, own.notes)


def hosts_of(config: RunConfig, own: Sequence[Place], every: Sequence[Place]) -> set[str]:
    """Return the names of the hosts that candidates use.

    These are the hosts of the config's tasks or, if all of them are on one host, all hosts.

    Args:
        own: the places of the config's tasks.
        every: a place for each slot.
    """
    found = {place.host for place in own}
    return found if len(found) > 1 else {place.host for place in every}


def site_at(places: Sequence[Place], num_workers: int, notes: Sequence[str] = ()) -> Site:
    """Return the site with a place for each slot of its hosts.

    Args:
        num_workers: the number of workers of the untuned config.
    """
    first = {place.host: place for place in reversed(places)}
    slots = Counter(place.host for place in places)
    known = [place.hardware for place in first.values() if place.hardware is not None]
    return Site(
        common_hardware(known) if known else Hardware(),
        tuple(len(first[host].gpus) for host in slots),
        tuple(slots),
        tuple(slots.values()),
        num_workers,
        tuple(note.removeprefix("warning: ") for note in notes if note.startswith("warning: ")),
    )


def common_hardware(hosts: Sequence[Hardware]) -> Hardware:
    """Return facts that hold on all hosts, to decide which settings to try.

    These are the cores of the host with the fewest, the features that all CPUs have, and the variables that the
    environment of any host sets.
    """
    weakest = min(hosts, key=lambda each: each.num_cores)
    environ: dict[str, str] = {}
    for each in reversed(hosts):
        environ |= each.environ
    return weakest._replace(
        features=[name for name in weakest.features if all(name in each.features for each in hosts)],
        # a name that no CPU has, if the hosts differ
        architecture=" and ".join(sorted({each.architecture for each in hosts})),
        environ=environ,
    )
