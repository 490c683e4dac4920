"""The interface of engines: an engine finds hosts for the tasks of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from distlaunch.base.run_dir import RunDir
from distlaunch.base.run_files.submission import JobState, Submission
from distlaunch.cluster.hardware import Hardware, parse_hardware
from distlaunch.config.run import RunConfig
from distlaunch.supervise.allocation import Allocation


@dataclass(frozen=True)
class Needs:
    """The requirements of a job on an engine.

    Attributes:
        num_tasks: number of processes to start.
        num_addresses: number of processes that the others must reach.
        jobs: for each job (`chief`, `worker`, `ps`), the number of its tasks that have addresses, in the order of the
            processes; empty for a single process. Only workers take slots of hosts: see `cluster.hosts.place_tasks`.
        ports: a port for each address, or `auto` for any free ports.
        failure_window_s: seconds after which a failure of a host is forgotten; None for never.
        avoids_failed_hosts: whether to leave out hosts that have failed twice.
    """

    num_tasks: int = 1
    num_addresses: int = 0
    jobs: Mapping[str, int] = field(default_factory=dict[str, int])
    ports: Sequence[int] | Literal["auto"] = "auto"
    failure_window_s: float | None = None
    avoids_failed_hosts: bool = True


@dataclass(frozen=True)
class HostFiles:
    """Files that a job reads on every host, in addition to the code of the working directory.

    Attributes:
        code: Python files, which must be the same on all hosts.
        data: paths by config key. If this machine has a path and a host does not, a warning names the host.
    """

    code: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class HostReport:
    """The report on a host that `distlaunch doctor` prints.

    Attributes:
        address: the address at which other hosts reach it; empty without other hosts.
        driver: version of the GPU driver; empty without GPUs.
        machine: an identifier that is unique to the machine.
        free_bytes: free space on the disk of the working directory.
        warnings: messages about possible problems.
        hardware: the facts that decide the settings of tasks.
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
    hardware: Hardware = Hardware()  # noqa: RUF009 (a tuple)

    @staticmethod
    def of(
        name: str, address: str, facts: Mapping[str, Any], state: Mapping[str, Any], warnings: Sequence[str]
    ) -> HostReport:
        """Make the report from an agent's messages; see `host_facts` and `host_state`."""
        known = {key: facts[key] for key in ("python", "packages", "cores", "memory_bytes", "gpus", "driver")}
        known["machine"] = facts.get("machine", "")  # an agent of a development version may not report it
        free_bytes = next(iter(state["free_bytes"].values()))
        hardware = parse_hardware(facts["hardware"])
        return HostReport(name, address, **known, free_bytes=free_bytes, warnings=warnings, hardware=hardware)


class Engine(Protocol):
    """Finds hosts for the tasks of a job.

    A command makes one engine and enters it once, around everything that it starts. While it is entered, the engine
    keeps resources that make later starts faster, such as connections to hosts and processes that have imported a
    framework. Processes of tasks are started and stopped by the allocation.

    Attributes:
        hosts: names of the hosts to which the engine connects; empty if it uses this machine only.
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
        """Check each host in the same way as a start. May be called several times while the engine is entered.

        Raises:
            UsageError: at least one host cannot be used; the message lists all problems.
        """
        ...

    def count_slots(self, *, dry: bool = False) -> int:
        """Return the number of workers for which there are slots. The engine must be entered, unless `dry`.

        Args:
            dry: connect to no host. A host without a configured number of slots counts as one slot.

        Raises:
            UsageError: hosts cannot be used.
        """
        ...

    def allocate(self, needs: Needs, *, dry: bool = False) -> Allocation:
        """Return hosts, devices and addresses. The engine must be entered, unless `dry`.

        Release an allocation before requesting the next one.

        Args:
            dry: reserve nothing. Values that are chosen at a start are replaced by placeholders.

        Raises:
            ConfigError: the config cannot be fulfilled.
            TooFewSlotsError: there are only `slots` slots for workers. The caller may try again with fewer workers, or
                with `avoids_failed_hosts=False`.
            UsageError: another resource is missing. The message names it.
        """
        ...


@dataclass(frozen=True)
class Start:
    """The command that a submitted job starts.

    Attributes:
        python: the interpreter of the launcher. That of the tasks is `engine.python`.
        folder: the working directory.
        options: more options of `distlaunch train`.
    """

    run: RunDir
    python: str
    folder: Path
    options: Sequence[str] = ()


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
