"""The candidates of `distlaunch tune`: the strategies that fit the hosts, and settings of the best of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distlaunch.base.errors import Problem
from distlaunch.base.plural import count
from distlaunch.base.run_files.trial_records import ModelFacts
from distlaunch.cluster.hardware import ONEDNN, POOL_SIZES, Hardware
from distlaunch.cluster.settings import kept_variables
from distlaunch.config.backend import missing_backend
from distlaunch.config.checks.config import cross_check
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.tree import Key
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies import MODELS, REFERENCE
from distlaunch.config.strategies.base import TrialSections
from distlaunch.tune.site import Site
from distlaunch.verify.trials import trial_config

UNTUNED = "untuned"
_MOST_DEVICES = 8
"""Maximum number of replicas on a CPU, and of processes. More have never been the fastest."""
_LONGER_CALL = 16
"""Number of steps per call that is tried besides `auto` and 1."""
_DEVICES_OF_WORKER = (1, 2)
"""Numbers of devices of each worker that are tried without GPUs."""
_KEPT_OF_CLUSTER = ("start_timeout_s", "stop_timeout_s", "stall_timeout_s", "isolate", "evaluator")
"""Keys of `cluster:` that stay under another strategy."""
SIXTEEN_BITS = "mixed_bfloat16"
_NO_FACTS = ModelFacts()


@dataclass(frozen=True)
class Change:
    """A setting that differs from the user's config.

    Attributes:
        label: its name in the table, such as `XLA`.
        keys: the values of config keys.
        environ: environment variables of the tasks, for settings without a key.
        is_16_bit: whether it changes the numbers as documented, by computing in 16 bits.
    """

    label: str
    keys: Mapping[Key, Any] = field(default_factory=dict[Key, Any])
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    is_16_bit: bool = False

    @property
    def names(self) -> set[Key | str]:
        """The keys and variables that are changed."""
        return {*self.keys, *self.environ}


@dataclass(frozen=True)
class Candidate:
    """A strategy with its cluster, and settings.

    Attributes:
        base: the user's config.
        label: the strategy in words, such as `mirrored, 2 replicas`; `untuned` for the user's config.
        strategy, cluster: the values of these sections; None for those of the user's config.
    """

    base: RunConfig
    label: str
    strategy: Mapping[str, Any] | None = None
    cluster: Mapping[str, Any] | None = None
    changes: tuple[Change, ...] = ()

    @property
    def name(self) -> str:
        """The label with the changes, which is different for each candidate."""
        return ", ".join([self.label, *(change.label for change in self.changes)])

    @property
    def identity(self) -> Hashable:
        """A value that is the same for the same changes in another order."""
        return self.label, frozenset(change.label for change in self.changes)

    @property
    def num_changes(self) -> int:
        return len(self.changes) + (self.strategy is not None)

    @property
    def is_16_bit(self) -> bool:
        return any(change.is_16_bit for change in self.changes)

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that the candidate needs, and for which there are no config keys."""
        return {name: value for change in self.changes for name, value in change.environ.items()}

    @property
    def keys(self) -> dict[Key, Any]:
        """The config keys that differ from the user's config, with their values."""
        found: dict[Key, Any] = {}
        if self.strategy is not None:
            found["strategy",] = dict(self.strategy)
            # keys of the old cluster, such as `ps`, may not fit the new strategy
            old = self.base.cluster.model_dump(exclude=set(_KEPT_OF_CLUSTER))
            cluster = Cluster.model_validate(self.cluster or {})
            new = {**cluster.model_dump(), "ports": self._ports_for(cluster)}
            found |= {("cluster", name): new[name] for name, value in old.items() if value != new[name]}
        return found | {key: value for change in self.changes for key, value in change.keys.items()}

    def _ports_for(self, cluster: Cluster) -> list[int] | str:
        """Return the user's ports that the tasks of another cluster take; `auto` if they need none or more ports."""
        assert self.strategy is not None, "the user's own cluster keeps its ports"
        ports = self.base.cluster.ports
        number = sum(MODELS[self.strategy["kind"]].model_validate(self.strategy).processes(cluster).values())
        return "auto" if ports == "auto" or not 0 < number <= len(ports) else ports[:number]

    @property
    def steps_per_call(self) -> int | str:
        return self.keys.get(("train", "steps_per_call"), self.base.train.steps_per_call)

    @property
    def config(self) -> RunConfig:
        """The user's config with the changes."""
        plain = self.base.to_plain()
        for key, value in self.keys.items():
            section, names = plain, [str(name) for name in key]
            for name in names[:-1]:
                section[name] = section[name] or {}
                section = section[name]
            section[names[-1]] = value
        return self.base.changed(plain)

    @property
    def trial_config(self) -> RunConfig:
        """The config of the candidate's timed trial."""
        config = self.config
        cluster = {**config.cluster.model_dump(), "stall_timeout_s": None}  # a trial waits while others are measured
        return trial_config(config, config.strategy.model_dump(), cluster, keeps_precision=True)

    def counted_config(self, site: Site) -> RunConfig:
        """Return the config with a known number of workers, also for the cluster of the untuned config."""
        return self.config if self.cluster is not None else self.config.with_workers(site.num_workers)

    @property
    def changed_names(self) -> set[Key | str]:
        """The keys and variables of all changed settings."""
        return {name for change in self.changes for name in change.names}

    @property
    def parent(self) -> Candidate:
        """The candidate without its last change."""
        return replace(self, changes=self.changes[:-1])

    def with_change(self, *changes: Change) -> Candidate:
        return replace(self, changes=(*self.changes, *changes))


@dataclass(frozen=True)
class NotTried:
    """A candidate, or a setting of several candidates, that is not measured, and the reason."""

    name: str
    reason: str


def untuned(config: RunConfig) -> Candidate:
    """Return the candidate with the user's own settings."""
    return Candidate(config, UNTUNED)


def strategies(config: RunConfig, site: Site) -> Iterator[Candidate | NotTried]:
    """Yield the strategies that this machine, or all hosts together, can host, the most promising first.

    One device, on the first host, is always among them.
    """
    counted = config.with_workers(site.num_workers)
    own = _identity(counted, site.num_gpus_for(counted))
    one_device: list[TrialSections] = [({"kind": REFERENCE}, {}), ({"kind": "jax", "mesh": {"batch": 1}}, {})]
    several = list(_on_hosts(site) if site.is_cluster else _on_one_host(site))
    if not several:
        devices = _devices(site.hardware.num_cores, site.gpus[0])
        yield NotTried("several replicas or processes", f"{_where(site)} has {devices}")
    for strategy, cluster in [*one_device, *several]:
        candidate = Candidate(config, "", strategy, cluster)
        try:
            changed = candidate.config
        except ValueError as error:
            yield NotTried(str(strategy["kind"]), f"does not fit: {error}")
            continue
        num_gpus = site.num_gpus_for(changed)
        candidate = replace(candidate, label=label_of(changed, num_gpus))
        if _identity(changed, num_gpus) == own:
            continue  # the untuned config
        if missing := missing_backend(changed.strategy.backend):
            yield NotTried(candidate.name, missing)
        elif problems := cross_check(changed, num_gpus):
            yield NotTried(candidate.name, _why_unfit(problems))
        elif site.slots and sum(site.slots) < changed.strategy.processes(changed.cluster).get("worker", 1):
            yield NotTried(candidate.name, f"{_where(site)} has {count(sum(site.slots), 'slot')} for workers")
        else:
            yield candidate
    if site.is_cluster:
        yield NotTried("mirrored", "it uses the devices of one host only")
        asynchronous = "its workers update the variables asynchronously, so that there are no losses to compare"
        yield NotTried("parameter_server", asynchronous)
    else:
        yield NotTried("parameter_server", "it is for several hosts; on one machine, its tasks only share the cores")


def _on_one_host(site: Site) -> Iterator[TrialSections]:
    """Yield the strategies with several devices or processes on one host."""
    num_gpus = site.gpus[0]
    devices = num_gpus or min(site.hardware.num_cores, _MOST_DEVICES)
    for number in sorted({number for number in (2, 4, 8, devices) if 1 < number <= devices}, reverse=True):
        for kind in ("multi_worker_mirrored", "mirrored", "jax", "dtensor"):
            yield from MODELS[kind].trials([number], num_gpus)


def _on_hosts(site: Site) -> Iterator[TrialSections]:
    """Yield the strategies that use all hosts."""
    # steps that XLA cannot compile are rarely the fastest
    in_lockstep = sorted(
        (model for model in MODELS.values() if model.in_lockstep), key=lambda model: model.refuses_jit_compile
    )
    for workers in site.worker_counts:
        of_host = max(1, -(-workers // len(site.hosts)))
        # without GPUs, a process may have several devices only on a mesh
        numbers = (max(1, min(site.gpus) // of_host),) if any(site.gpus) else _DEVICES_OF_WORKER
        for devices in numbers:
            for model in in_lockstep:
                found = model.trial_on_hosts(workers, devices)
                if found is not None and (devices == 1 or any(site.gpus) or not model.has_replicas):
                    yield found


def _where(site: Site) -> str:
    return site.hosts[0] if site.hosts else "this machine"


def _why_unfit(problems: Iterable[Problem]) -> str:
    return "does not fit: " + "; ".join(f"{each.dotted}: {each.message}" for each in problems)


def _devices(num_cores: int, num_gpus: int) -> str:
    return count(num_gpus, "GPU") if num_gpus else count(num_cores, "core")


def label_of(config: RunConfig, num_gpus: int) -> str:
    """Return a strategy in words, such as `multi_worker_mirrored, 2 workers, 2 replicas`."""
    label = config.strategy.label(config.cluster)
    words = config.strategy.words(config.cluster, num_gpus)
    # the label of a mesh has its sizes, and that of parameter servers their workers
    return ", ".join([label, *(word for word in words if label == config.strategy.kind or _adds_to(label, word))])


def _adds_to(label: str, word: str) -> bool:
    """Return True if a word is new to the label of a mesh or of servers; a word with the sizes of a mesh is not."""
    return word not in label and not word.startswith("mesh ")


def _identity(config: RunConfig, num_gpus: int) -> tuple[Any, ...]:
    """Return a value that is the same for two configs if the same devices do the same work."""
    rest = config.strategy.model_dump(exclude={"replicas", "replicas_per_worker"})
    parts = config.strategy.num_parts(config.cluster, num_gpus)
    return str(rest), parts, config.strategy.processes(config.cluster)


def settings(candidate: Candidate, site: Site, facts: ModelFacts = _NO_FACTS) -> Iterator[Candidate | NotTried]:
    """Yield a candidate with each single setting changed that it has not changed yet, the most promising first.

    A setting has the same value on all hosts. A setting without effect is yielded only for a strategy without changes.

    Args:
        facts: the properties of the model, which decide on the order.
    """
    counted = candidate.counted_config(site)
    num_gpus = site.num_gpus_for(counted)
    for found in _changes(counted, site.hardware, num_gpus, site.workers_per_host(counted), facts):
        if isinstance(found, NotTried):
            if not candidate.changes:
                yield NotTried(f"{candidate.name}, {found.name}", found.reason)
        elif not found.names & candidate.changed_names:
            changed = candidate.with_change(found)
            problems = cross_check(changed.config, num_gpus)
            yield NotTried(changed.name, _why_unfit(problems)) if problems else changed


def _changes(
    config: RunConfig, hardware: Hardware, num_gpus: int, workers_per_host: int, facts: ModelFacts
) -> Iterator[Change | NotTried]:
    lengths = () if config.train.callbacks else ("auto", _LONGER_CALL, 1)
    if not lengths:
        yield NotTried("steps per call", "the callbacks of the config, which do not run here, may need each step")
    own = config.train.steps_per_call
    calls = [
        Change(f"steps_per_call {other}", {("train", "steps_per_call"): other}) for other in lengths if other != own
    ]
    # a budget may end before the last ones; `auto` is rarely slower than a number
    if own != "auto":
        yield from calls
    # XLA helps most models; on CPUs, it doubles the steps of those with convolutions, and it draws other random numbers
    xla, xla_is_last = _xla_change(config, num_gpus), facts.random or (facts.convolutions and not num_gpus)
    if not xla_is_last:
        yield xla
    yield from _thread_changes(hardware, num_gpus, workers_per_host)
    yield _onednn_change(config, hardware, num_gpus)
    if own == "auto":
        yield from calls
    if xla_is_last:
        yield xla
    if config.precision in (None, "float32"):
        yield Change(f"{SIXTEEN_BITS} (16 bits)", {("precision",): SIXTEEN_BITS}, is_16_bit=True)


def _xla_change(config: RunConfig, num_gpus: int) -> Change | NotTried:
    strategy = config.strategy
    if not strategy.runs_tensorflow:
        return NotTried("XLA", "no effect: JAX always uses it")
    if strategy.refuses_jit_compile or strategy.num_parts(config.cluster, num_gpus) != 1:
        return NotTried("XLA", "no effect: jit_compile is for a single replica")
    compiles = config.compile is not None and config.compile.jit_compile is True
    return Change("no XLA" if compiles else "XLA", {("compile", "jit_compile"): not compiles})


def _onednn_change(config: RunConfig, hardware: Hardware, num_gpus: int) -> Change | NotTried:
    if not config.strategy.runs_tensorflow:
        return NotTried("oneDNN", "no effect on JAX")
    if num_gpus:
        return NotTried("oneDNN", "no effect on GPUs")
    now = kept_variables(hardware).get(ONEDNN, "").lower()
    if not now:
        return NotTried("oneDNN", "TensorFlow's builds for this system do not offer it")
    return (
        Change("oneDNN off", environ={ONEDNN: "0"})
        if now in ("1", "true")
        else Change("oneDNN on", environ={ONEDNN: "1"})
    )


def _thread_changes(hardware: Hardware, num_gpus: int, num_tasks: int) -> Iterator[Change | NotTried]:
    cores = hardware.num_cores
    if num_gpus:
        yield NotTried("threads", "no effect on GPUs")
    elif any(name in hardware.environ for name in POOL_SIZES):
        yield NotTried("threads", "your environment sets them")
    else:
        share = max(1, cores // num_tasks)
        others: Sequence[int] = sorted({1, share // 2, min(cores, 2 * share)} - {0, share})
        if not others:
            yield NotTried("threads", f"there is {count(cores, 'core')}")
        for number in others:
            yield Change(count(number, "thread"), environ=dict.fromkeys(POOL_SIZES, str(number)))
