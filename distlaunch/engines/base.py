"""The interface of engines: an engine finds hosts for the tasks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import JobState, Submission
from distlaunch.config.run import RunConfig
from distlaunch.supervise.allocation import Allocation


@dataclass(frozen=True)
class Needs:
    """The requirements of a job on an engine.

    Attributes:
        num_tasks: number of processes to start.
        num_addresses: how many of them the others must reach.
        num_computing: how many of them compute most of the time: those of a host share its cores.
        jobs: how many tasks with addresses there are of each job (`chief`, `worker`, `ps`), in their order; empty: a
            single process. Each worker takes a slot of a host, and nothing else does: see `cluster.hosts.place_tasks`.
        ports: one for each address, or any that are free.
        failure_window_s: what a host did longer ago is forgotten; None: nothing is.
        avoids_failed_hosts: do without hosts that have failed twice. False: the others do not suffice.
    """

    num_tasks: int = 1
    num_addresses: int = 0
    num_computing: int = 1
    jobs: Mapping[str, int] = field(default_factory=dict[str, int])
    ports: Sequence[int] | Literal["auto"] = "auto"
    failure_window_s: float | None = None
    avoids_failed_hosts: bool = True


@dataclass(frozen=True)
class HostFiles:
    """Files that a job reads on every host, beside the code of the working directory.

    Attributes:
        code: Python files, which must be the same everywhere.
        data: keys of the config -> paths. A host without one of them is named, if this machine has it.
    """

    code: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class HostReport:
    """The report on a host that `distlaunch doctor` prints.

    Attributes:
        address: the address at which other hosts reach it; empty if there are none.
        driver: version of the GPU driver; empty if there is none.
        machine: what no other machine has.
        free_bytes: on the disk of the working directory.
        warnings: what may become a problem.
    """

    name: str
    address: str
    python: str
    packages: Mapping[str, str]
    cores: int
    memory_bytes: int
    gpus: Sequence[str]
    driver: str
    machine: str
    free_bytes: int
    warnings: Sequence[str] = ()

    @staticmethod
    def of(
        name: str, address: str, facts: Mapping[str, Any], state: Mapping[str, Any], warnings: Sequence[str]
    ) -> HostReport:
        """Make the report from an agent's messages; see `host_facts` and `host_state`."""
        known = {key: facts[key] for key in ("python", "packages", "cores", "memory_bytes", "gpus", "driver")}
        known["machine"] = facts.get("machine", "")  # an agent of the same version may be older
        free_bytes = next(iter(state["free_bytes"].values()))
        return HostReport(name, address, **known, free_bytes=free_bytes, warnings=warnings)


class Engine(Protocol):
    """Finds hosts for the tasks of a job.

    A command makes one engine, and enters it once, around everything that it starts. The engine owns what makes a
    later start faster, such as connections to hosts and processes that have imported a framework, and gives it up when
    it is left. Everything that touches a process happens in the allocation.

    Attributes:
        hosts: names of the hosts that a start asks first; empty: none but this machine.
        uses_this_machine_only: whether all tasks of a job run on this machine.
    """

    @property
    def hosts(self) -> Sequence[str]: ...

    @property
    def uses_this_machine_only(self) -> bool: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def examine(self) -> list[HostReport]:
        """Check each host as a start does. Call it while the engine is entered; it may be called again.

        Raises:
            UsageError: at least one host cannot be used; the message lists all problems.
        """
        ...

    def count_slots(self, *, dry: bool = False) -> int:
        """Return how many workers there are places for. To be called while the engine is entered, unless `dry`.

        Args:
            dry: ask no host; one that does not say how many it takes counts as one.

        Raises:
            UsageError: hosts cannot be used.
        """
        ...

    def allocate(self, needs: Needs, *, dry: bool = False) -> Allocation:
        """Return hosts, devices and addresses. To be called while the engine is entered, unless `dry`.

        One allocation is used at a time: it is released before the next one is asked for.

        Args:
            dry: reserve nothing; what is chosen at a start only has a stand-in.

        Raises:
            ConfigError: the config asks for what cannot be had.
            TooFewSlotsError: there are `slots` places for workers, and more are asked for. The job is tried again with
                fewer workers if it allows that, else with `avoids_failed_hosts=False`.
            UsageError: there is too little of something, with what is missing.
        """
        ...


@dataclass(frozen=True)
class Start:
    """The command that a submitted job starts.

    Attributes:
        python: the interpreter of the launcher; `engine.python` is that of the tasks.
        folder: the working directory.
    """

    run: RunDir
    python: str
    folder: Path


class Queue(Protocol):
    """A queue in which jobs wait for their hosts."""

    name: str

    def notes(self, config: RunConfig) -> list[str]:
        """Return lines that the user should see before a job is submitted."""
        ...

    def script(self, config: RunConfig, start: Start) -> str:
        """Return the batch script of a job. Raise ConfigError if it cannot be written."""
        ...

    def submit(self, script: Path, config: RunConfig, environ: Mapping[str, str]) -> Submission:
        """Submit a script and return the job. Raise UsageError with the message of the queue if it refuses."""
        ...

    def states(self, jobs: Sequence[Submission]) -> dict[Submission, JobState]:
        """Return the states of jobs. Raise QueueBusyError if the queue is silent, UsageError if there is none."""
        ...

    def cancel(self, job: Submission) -> None:
        """Cancel a pending job."""
        ...

    def stop(self, job: Submission, *, at_once: bool = False) -> None:
        """Ask a running job to stop with a checkpoint and not to requeue itself."""
        ...
