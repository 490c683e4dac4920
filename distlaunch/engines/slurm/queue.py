"""Slurm's queue: submits jobs, returns their states and stops them, using Slurm's commands."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distlaunch.base.errors import ConfigError, Problem, QueueBusyError, UsageError
from distlaunch.base.run_files.submission import JobState, Phase, Submission
from distlaunch.config.engines.slurm import Slurm
from distlaunch.config.read.words import show
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Start
from distlaunch.engines.slurm.script import batch_script, needed_nodes, num_nodes, section_of, setup_check

_TIMEOUT_S = 60.0
"""Time for an answer of Slurm's controller, which may be busy or just be restarting."""
_PHASES: Mapping[str, Phase] = {
    "PENDING": "pending", "REQUEUED": "pending", "REQUEUE_FED": "pending", "REQUEUE_HOLD": "pending",
    "SPECIAL_EXIT": "pending", "RESV_DEL_HOLD": "pending", "CONFIGURING": "pending",
    "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running", "STOPPED": "running", "SIGNALING": "running",
    "STAGE_OUT": "running", "RESIZING": "running",
}  # fmt: skip
"""The phase of each state of Slurm in which a job has not ended."""
_SETTINGS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_UMASK", "SLURM_TIME_FORMAT")
"""Slurm's variables that are settings of the user. Others may belong to a job in which `submit` runs."""
_VARIABLES = {
    "account": "ACCOUNT", "partition": "PARTITION", "qos": "QOS", "time": "TIMELIMIT", "mem": "MEM_PER_NODE",
    "constraint": "CONSTRAINT", "gpus": "GPUS_PER_NODE", "job_name": "JOB_NAME",
}  # fmt: skip
"""Variable `SBATCH_...` for each key. It would override the script, so it is removed if the config sets the key."""
_NEVER = {f"SBATCH_{name}" for name in ("OPEN_MODE", "SIGNAL", "REQUEUE", "NO_REQUEUE", "ARRAY_INX", "WAIT", "OUTPUT")}


class SlurmQueue:
    """The queue of the Slurm cluster that the commands on PATH use."""

    name = "slurm"

    def notes(self, config: RunConfig) -> list[str]:
        """Return a note on nodes that no task will run on."""
        found, cluster = list[str](), config.cluster
        nodes, needed = num_nodes(config), needed_nodes(config)
        if cluster.workers != "auto" and not cluster.ps and nodes > needed:
            what = f"engine.nodes is {nodes}, but {needed} are enough for cluster.workers"
            found.append(f"{what}: the others are spares for restarts")
        return found

    def script(self, config: RunConfig, start: Start) -> str:
        """Return the batch script. Raise ConfigError if a shell cannot parse a set-up line."""
        if problems := list(_setup_problems(section_of(config).setup)):
            raise ConfigError(problems)
        return batch_script(config, start)

    def submit(self, script: Path, config: RunConfig, environ: Mapping[str, str]) -> Submission:
        """Submit a script with sbatch. Raise UsageError with the message of Slurm if it refuses."""
        # `--parsable` prints JOB or JOB;CLUSTER
        try:
            output = _run(["sbatch", "--parsable", str(script)], submission_environment(section_of(config), environ))
        except QueueBusyError as error:
            raise UsageError(f"Slurm rejected the job: {error}") from None
        job, _, cluster = output.strip().splitlines()[-1].partition(";")
        return Submission(self.name, job, time.time(), cluster)

    def states(self, jobs: Sequence[Submission]) -> dict[Submission, JobState]:
        """Return the states of jobs. Raise QueueBusyError if the queue is silent, UsageError if there is none."""
        found: dict[Submission, JobState] = {}
        for cluster in dict.fromkeys(job.cluster for job in jobs):
            jobs_there = [job for job in jobs if job.cluster == cluster]
            output = _squeue(cluster, [job.job for job in jobs_there])
            found |= {job: output.get(job.job, JobState("ended")) for job in jobs_there}
        return found

    def cancel(self, job: Submission) -> None:
        """Cancel a pending job."""
        _run(["scancel", *_clusters(job.cluster), job.job])

    def stop(self, job: Submission, *, at_once: bool = False) -> None:
        """Ask a running job to stop with a checkpoint and not to requeue itself."""
        # the batch script explains these signals
        number = "INT" if at_once else "USR2"
        _run(["scancel", *_clusters(job.cluster), "--batch", f"--signal={number}", job.job])


def submission_environment(job: Slurm, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch.

    It lacks the variables of a job in which this command runs, and variables that would override the script.
    """
    written = {f"SBATCH_{variable}" for key, variable in _VARIABLES.items() if getattr(job, key) is not None}
    return {
        name: value
        for name, value in environ.items()
        if name in _SETTINGS or not (name.startswith(("SLURM_", "SLURMD_")) or name in written | _NEVER)
    }


def _setup_problems(setup: Sequence[str]) -> Iterator[Problem]:
    for number, command in enumerate(setup):
        # a line with an open quote, for example, would swallow the rest of the script
        for text in setup_check(command):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, encoding="utf-8")
            if done.returncode or done.stderr or "\0" in text:
                output = done.stderr.strip().splitlines()[:1]
                why = output[0].removeprefix("bash: line ").partition(": ")[2] if output else "NUL"
                yield Problem(("engine", "setup", number), f"got {show(command)}, which bash cannot read: {why}")
                break


def _squeue(cluster: str, jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the states of jobs.

    `squeue --json` is not used: its fields depend on Slurm's version, and old versions then print all jobs.
    """
    command = ["squeue", *_clusters(cluster), "--noheader", "--states=all", "--format=%i|%T|%r"]
    try:
        output = _run([*command, f"--jobs={','.join(jobs)}"])
    except QueueBusyError as error:
        # Slurm forgets a job some minutes after its end
        if "Invalid job id" in str(error):
            return {}
        raise
    found: dict[str, JobState] = {}
    for line in output.splitlines():
        job, _, rest = line.strip().partition("|")
        word, _, why = rest.partition("|")
        if word:
            found[job] = JobState(_PHASES.get(word, "ended"), word, "" if why == "None" else why)
    return found


def _clusters(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    environ = {**(os.environ if environ is None else environ), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, env=environ
        )
    except FileNotFoundError:
        raise UsageError(
            f"there is no `{command[0]}` on this machine's PATH; use a login node of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise QueueBusyError(f"`{command[0]}` did not answer within {_TIMEOUT_S:g} s") from None
    if "Could not establish a configuration source" in done.stderr:
        raise UsageError("Slurm is not configured on this machine; use a login node of the Slurm cluster")
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        output = " / ".join(line.removeprefix(f"{command[0]}: error: ") for line in lines[-3:])
        raise QueueBusyError(f"{command[0]}: {output or f'exit code {done.returncode}'}")
    return done.stdout
