"""Decides from the hardware of all hosts of a run which environment variables and cores each task gets.

The decision is made once for each attempt, before a framework is imported. Settings that change how results are rounded
are the same on all hosts, are recorded with the run, and stay the same for its resumes, evaluations and exports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from distlaunch.base.plural import count, listed
from distlaunch.cluster.hardware import GPU_THREADS, ONEDNN, POOL_SIZES, XLA_FLAGS, Hardware

Source = Literal["hardware", "run", "environment"]
Cores = frozenset[int]
KEPT = (ONEDNN,)
"""Variables that change how results are rounded."""
_ON, _OFF = ("1", "true"), ("0", "false")
"""Values that TensorFlow reads as on and off, in any case; it ignores all others."""
_DEFAULT_ON = ("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
"""Features with which TensorFlow turns oneDNN on by itself.

Source: `DefaultOneDnnPolicy` in tensorflow/core/util/port.cc.
"""
LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"


class _ForGpus(NamedTuple):
    """A variable for tasks with GPUs, set if the run has at least `min_gpus` of them."""

    name: str
    value: str
    min_gpus: int
    effect: str


_TENSORFLOW = _ForGpus(
    GPU_THREADS, "gpu_private", 1, "separate threads launch kernels, so that work on input does not delay them"
)
_FOR_GPUS: dict[str | None, _ForGpus] = {
    "tensorflow": _TENSORFLOW,
    "jax": _ForGpus(XLA_FLAGS, LATENCY_HIDING, 2, "XLA lets their communication overlap with their computations"),
    # scripts get no XLA flags, because their version of JAX may not know a flag and would then end the process
    None: _TENSORFLOW,
}
"""The variable for each Keras backend; the key None is for scripts.

Sources: "Optimize TensorFlow GPU performance with the TensorFlow Profiler" in TensorFlow's guide; "Environment
Variables" of NVIDIA's JAX Toolbox.
"""


@dataclass(frozen=True)
class Setting:
    """An environment variable of the tasks of a host, and the reason for its value.

    Attributes:
        source: the facts of the hosts, the record of the run, or the environment of the user, which wins.
    """

    name: str
    value: str
    reason: str
    source: Source = "hardware"


@dataclass(frozen=True)
class HostSettings:
    """The settings of the tasks of one host.

    Attributes:
        cores: the cores of each task that computes; empty if tasks are not bound to cores.
    """

    settings: tuple[Setting, ...] = ()
    cores: tuple[Cores, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of each task."""
        return {setting.name: setting.value for setting in self.settings}


@dataclass(frozen=True)
class RunSettings:
    """The settings of all tasks of a run.

    Attributes:
        hosts: the settings by host; a host is missing if its hardware is unknown.
        warnings: messages to the user about settings that differ from those recorded.
    """

    hosts: Mapping[str, HostSettings] = field(default_factory=dict[str, HostSettings])
    warnings: tuple[str, ...] = ()

    def of(self, host: str) -> HostSettings:
        return self.hosts.get(host, HostSettings())

    @property
    def rows(self) -> list[tuple[Setting, tuple[str, ...]]]:
        """Return each setting with the hosts that have it, or without hosts if all of them have it."""
        found: dict[Setting, list[str]] = {}
        for host, settings in self.hosts.items():
            for setting in settings.settings:
                found.setdefault(setting, []).append(host)
        return [(setting, () if len(hosts) == len(self.hosts) else tuple(hosts)) for setting, hosts in found.items()]

    def to_plain(self) -> list[dict[str, Any]]:
        """Return the JSON form, which environment.json and plan.json contain."""
        return [
            {"name": setting.name, "value": setting.value, "reason": setting.reason, "source": setting.source,
             **({"hosts": list(hosts)} if hosts else {})}
            for setting, hosts in self.rows
        ]  # fmt: skip


def decide(
    hosts: Mapping[str, Hardware],
    num_computing: Mapping[str, int],
    *,
    backend: str | None = None,
    recorded: Mapping[str, str] | None = None,
) -> RunSettings:
    """Return the settings of a run.

    Args:
        hosts: the hardware of each host, by name.
        num_computing: for each host, the number of tasks that compute most of the time and share its cores.
        backend: the Keras backend of the tasks; None if they run a script, whose framework is unknown.
        recorded: the variables with which the run was trained; those in `KEPT` are used again. None for a new run.
    """
    if not hosts:
        return RunSettings()
    trained_with = (recorded or {}).get(ONEDNN)
    kept, warnings = _decide_onednn(hosts, trained_with if _is_on(trained_with) is not None else None)
    num_gpus = sum(len(hardware.gpus) for hardware in hosts.values())
    return RunSettings(
        {
            host: HostSettings(
                (
                    *kept.get(host, ()),
                    *_pools(hardware, num_computing.get(host, 1)),
                    *_gpu_settings(hardware, backend, num_gpus),
                ),
                () if hardware.gpus else tuple(numa_shares(num_computing.get(host, 1), hardware)),
            )
            for host, hardware in hosts.items()
        },
        tuple(warnings),
    )


def kept_variables(hardware: Hardware, recorded: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of `KEPT` for a process that is not a task of a run, as in `train --debug`.

    Args:
        recorded: see `decide`.
    """
    variables = decide({"": hardware}, {}, recorded=recorded).of("").variables
    return {name: variables[name] for name in KEPT if name in variables}


def settings_in_effect(hardware: Hardware, recorded: Mapping[str, str]) -> RunSettings:
    """Return the settings of a process that trains by itself, as in a notebook, and may have imported TensorFlow early.

    Args:
        recorded: see `decide`.
    """
    value = hardware.environ.get(ONEDNN)
    if _is_on(value) is None:
        if not _has_builds_with_onednn(hardware):
            return RunSettings()
        value, reason = str(int(_is_default_on(hardware))), "TensorFlow has chosen it for this CPU"
    else:
        reason = "the environment of the process sets it"
    setting = Setting(ONEDNN, str(value), reason, "environment")
    _, warnings = _decide_onednn({"": hardware._replace(environ={ONEDNN: setting.value})}, recorded.get(ONEDNN))
    return RunSettings({"": HostSettings((setting,))}, tuple(warnings))


def _decide_onednn(
    hosts: Mapping[str, Hardware], recorded: str | None
) -> tuple[dict[str, tuple[Setting, ...]], list[str]]:
    """Return the setting of oneDNN of each host, and warnings."""
    given = {host: hardware.environ[ONEDNN] for host, hardware in hosts.items() if ONEDNN in hardware.environ}
    chosen = _choose_onednn(hosts, given, recorded)
    settings = {
        host: (Setting(ONEDNN, given[host], _FROM_ENVIRONMENT, "environment"),) if host in given
        else (chosen,) if chosen is not None
        else ()
        for host in hosts
    }  # fmt: skip
    warnings: list[str] = []
    values = list(dict.fromkeys(given.values()))
    if _is_on(recorded) is not None and any(_is_on(value) is not _is_on(recorded) for value in values):
        warnings.append(
            f"your environment sets {ONEDNN}={values[0]}, but the run was trained with {recorded}: "
            "results are rounded differently than in its training"
        )
    if len(values) > 1:
        each = ", ".join(f"{value or 'nothing'} on {host}" for host, value in given.items())
        warnings.append(f"the environments of the hosts set different values of {ONEDNN} ({each}); set one for all")
    return settings, warnings


def _choose_onednn(hosts: Mapping[str, Hardware], given: Mapping[str, str], recorded: str | None) -> Setting | None:
    """Return the setting for hosts whose environment has none; None to leave the decision to TensorFlow."""
    # TensorFlow ignores values other than on and off, and then decides for each host by itself
    valid = {host: value for host, value in given.items() if _is_on(value) is not None}
    if valid:
        host, value = next(iter(valid.items()))
        return Setting(ONEDNN, value, f"the environment of {host} sets it, and all hosts must round alike")
    by_facts = _choose_by_facts(hosts)
    if recorded is None or (by_facts is not None and _is_on(by_facts.value) is _is_on(recorded)):
        return by_facts
    reason = "the run was trained with this value, and another one would round differently"
    return Setting(ONEDNN, recorded, reason, "run")


def _choose_by_facts(hosts: Mapping[str, Hardware]) -> Setting | None:
    """Return the setting of oneDNN of a new run, the same for all hosts; None to leave it to TensorFlow."""
    if not all(map(_has_builds_with_onednn, hosts.values())):
        return None  # builds for other systems have no oneDNN, or already choose well
    if slow := [host for host, each in hosts.items() if "avx2" not in each.features]:
        return Setting(ONEDNN, "0", f"{_the_cpu(slow)} no AVX2, which oneDNN's kernels need to be fast")
    if off := [host for host, each in hosts.items() if not _is_default_on(each)]:
        reason = f"{_the_cpu(off)} AVX2, for which oneDNN's kernels are faster; TensorFlow alone would leave them off"
        return Setting(ONEDNN, "1", reason)
    found = dict.fromkeys(next(name for name in _DEFAULT_ON if name in each.features) for each in hosts.values())
    features = " or ".join(name.upper().replace("_", "-") for name in found)
    reason = f"{_the_cpu(list(hosts))} {features}, for which TensorFlow turns oneDNN on; resumes on other hosts keep it"
    return Setting(ONEDNN, "1", reason)


def _has_builds_with_onednn(hardware: Hardware) -> bool:
    return hardware.system == "linux" and hardware.architecture == "x86_64"


def _is_default_on(hardware: Hardware) -> bool:
    """Return True if TensorFlow turns oneDNN on by itself."""
    return bool(set(_DEFAULT_ON) & set(hardware.features))


def _the_cpu(hosts: Sequence[str]) -> str:
    """Return the subject and verb of a sentence on what the CPUs of hosts have.

    This machine is given as an empty name, which the text leaves out.
    """
    where = f" of {listed(hosts)}" if any(hosts) else ""
    return f"the CPU{where} has" if len(hosts) == 1 else f"the CPUs{where} have"


_FROM_ENVIRONMENT = "your environment sets it"


def _is_on(value: Any) -> bool | None:
    """Return whether TensorFlow reads a value as on or off, or None if it ignores the value."""
    if not isinstance(value, str):
        return None
    return True if value.lower() in _ON else False if value.lower() in _OFF else None


def _pools(hardware: Hardware, num_tasks: int) -> list[Setting]:
    """Return the variables that limit each task to its share of the cores.

    Without limits, each task starts threads for all cores. Measured with TensorFlow 2.21, a CNN and
    `multi_worker_mirrored` on 2 cores: limits reduce the time of a step to 0.88 of the time without limits for 2 tasks,
    0.85 for 4, 0.87 for 8.
    """
    seen = len(hardware.usable_cores)
    share = max(1, hardware.num_cores // max(1, num_tasks))
    cores = count(hardware.num_cores, "core")
    reason = f"{count(num_tasks, 'task')} share {cores}" if num_tasks > 1 else f"the task may use {cores}"
    if hardware.num_cores < seen:
        reason += f", the container's limit on a host that shows {seen}"
    found: list[Setting] = []
    for name in POOL_SIZES:
        if name in hardware.environ:
            found.append(Setting(name, hardware.environ[name], _FROM_ENVIRONMENT, "environment"))
        elif share != seen:  # a task with all cores gets no limits, and behaves as if started without the launcher
            found.append(Setting(name, str(share), reason))
    return found


def _gpu_settings(hardware: Hardware, backend: str | None, num_gpus: int) -> list[Setting]:
    """Return the settings that TensorFlow and NVIDIA recommend for tasks with GPUs."""
    if not hardware.gpus:
        return []
    wanted = _FOR_GPUS[backend]
    if num_gpus < wanted.min_gpus:
        return []
    if wanted.name in hardware.environ:
        return [Setting(wanted.name, hardware.environ[wanted.name], _FROM_ENVIRONMENT, "environment")]
    return [Setting(wanted.name, wanted.value, f"the run has {count(num_gpus, 'GPU')}: {wanted.effect}")]


def numa_shares(num_tasks: int, hardware: Hardware) -> list[Cores]:
    """Return the cores of each task, so that it uses memory of its NUMA node.

    Empty if the nodes cannot be shared equally, or the tasks are bound to some of the cores already.
    """
    usable: Collection[int] = frozenset(hardware.usable_cores)
    nodes = [cores for node in hardware.numa_nodes if (cores := frozenset(node) & usable)]
    if (
        len(usable) < hardware.logical_cores or len(nodes) < 2 or num_tasks % len(nodes) or len({*map(len, nodes)}) > 1
    ):  # fmt: skip
        return []
    return [nodes[number * len(nodes) // num_tasks] for number in range(num_tasks)]
