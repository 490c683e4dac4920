"""Tasks on the nodes of a Slurm allocation. On each node, `srun` starts an agent in a job step."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping, Sequence

from distlaunch.base.errors import UsageError
from distlaunch.cluster.hosts import Host
from distlaunch.cluster.machine import Machine
from distlaunch.config.engines.slurm import Slurm
from distlaunch.engines.base import HostFiles
from distlaunch.engines.remote.engine import RemoteEngine, python_of
from distlaunch.engines.remote.link import Command
from distlaunch.engines.remote.ssh_errors import explain_python

_OPTIONS = ("--nodes=1", "--ntasks=1", "--mem=0", "--mpi=none", "--unbuffered", "--quiet", "--wait=0", "--input=all")
_OUTPUT_SETTINGS = ("SLURM_LABELIO", "SRUN_LABELIO", "SLURM_STDOUTMODE", "SLURM_STDINMODE", "SLURM_STDERRMODE")
"""Variables by which a user changes how srun handles output. They would corrupt the messages of an agent."""
_REQUESTS = (
    "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND",
    "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_CPUS_PER_GPU",
    "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE",
)  # fmt: skip
"""Options of the job, or of the step that runs this command, which srun would take for options of the agent's step."""
_TIMEOUT_S = 60.0


def slurm_engine(settings: Slurm, machine: Machine, files: HostFiles) -> RemoteEngine:
    """Return the engine of the nodes of the allocation. Raise UsageError if there is no allocation."""
    environ = machine.environ
    if reason := settings.why_no_hosts(environ):
        raise UsageError(
            f"engine.kind: slurm: {reason}; "
            "start it with `sbatch` or `salloc`; to train, you can also use `distlaunch submit`"
        )
    if "SLURM_JOB_NODELIST" not in environ:
        raise UsageError(
            "engine.kind: slurm: SLURM_JOB_ID is set, but SLURM_JOB_NODELIST, which names the nodes, is not; "
            "pass on all variables whose names begin with SLURM_, or use kind: local"
        )
    cpus = node_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    # if no number of tasks was requested, these are CPUs
    tasks = node_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    whole = node_names(environ["SLURM_JOB_NODELIST"])
    # within `srun`, use the nodes of its step, which may be fewer
    in_step = int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    nodes = node_names(environ["SLURM_STEP_NODELIST"]) if in_step else whole
    slots = dict(zip(whole, tasks, strict=False)) if "SLURM_NTASKS" in environ else {}
    if "SLURM_NTASKS_PER_NODE" not in environ:
        # one task for each node is Slurm's default
        slots = {name: count for name, count in slots.items() if count > 1}
    num_cpus = dict(zip(whole, cpus, strict=False))
    hosts = [Host(name, slots=settings.workers_per_node or slots.get(name)) for name in nodes]

    @functools.cache
    def num_gpus() -> dict[str, int]:
        has_gpus = any(name.startswith("SLURM_") and ("GPU" in name or "TRES" in name) for name in environ)
        return node_gpus(environ["SLURM_JOB_ID"]) if has_gpus else {}

    def command_of(host: Host) -> Command:
        python = python_of(host, settings)

        def explain(stderr: str, code: int | None) -> str:
            last = " / ".join([line for line in stderr.splitlines() if line.strip()][-3:])
            return explain_python(stderr, python) or f"srun ended with exit code {code}: {last or 'no message'}"

        resources = num_cpus.get(host.name), num_gpus().get(host.name)
        command = srun_agent_command(host, python, *resources, environ, settings.srun)
        return Command(command, explain)

    return RemoteEngine("slurm", hosts, command_of, "srun", settings, machine, files)


def srun_agent_command(
    host: Host,
    python: str,
    num_cpus: int | None,
    num_gpus: int | None,
    environ: Mapping[str, str],
    more: Sequence[str] = (),
) -> list[str]:
    """Return the `srun` command that starts an agent. It also works within a job step.

    Args:
        num_cpus: number of CPUs that the job has on the host; None if unknown.
        num_gpus: number of GPUs that the job has on the host; None if unknown.
        more: additional options of srun.
    """
    unset = [word for name in (*_OUTPUT_SETTINGS, *_REQUESTS) if name in environ for word in ("-u", name)]
    # since Slurm 22.05, a step does not pass this option on to the steps inside it
    cpus = [f"--cpus-per-task={num_cpus}"] if num_cpus else []
    # by default, a step requests the GPUs of the whole job if the job has a total, or those of one task. Only `--gpus`
    # gets all GPUs of a node in each case
    gpus = [f"--gpus={num_gpus}"] if num_gpus else []
    srun = ["srun", "--overlap", f"--nodelist={host.name}", *_OPTIONS, *cpus, *gpus, *more]
    return [*(["env", *unset] if unset else []), *srun, python, "-P", "-m", "distlaunch.agent.remote"]


def node_counts(text: str) -> list[int]:
    """Parse Slurm's `4(x2),8` into one number for each node."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def node_gpus(job: str) -> dict[str, int]:
    """Return the number of GPUs that a job has on each node; empty if Slurm does not report it."""
    try:
        done = subprocess.run(
            ["scontrol", "--details", "show", "job", job],
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, int] = {}
    # Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-2,5),nic:1
    for nodes, text in re.findall(r"^\s*Nodes=(\S+) .*\bGRES=(\S*)", done.stdout, re.MULTILINE):
        parts = [part.split(":") for part in re.sub(r"\([^)]*\)", "", text).split(",")]
        number = sum(int(part[-1]) for part in parts if part[0] == "gpu" and part[-1].isdecimal())
        found |= dict.fromkeys(node_names(nodes), number)
    return found


def node_names(nodelist: str) -> list[str]:
    """Expand `n[1-3,7]` to the names of nodes, in Slurm's order."""
    if "[" not in nodelist:
        return nodelist.split(",")
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        raise UsageError(f"`scontrol show hostnames {nodelist}` failed: {message.strip()}") from None
    return done.stdout.split()
