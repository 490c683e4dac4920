"""Traits of engines, declared by their config classes. The rest of the program never tests for an engine's kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from distlaunch.base.errors import Problem
from distlaunch.config.base import Section, Words

if TYPE_CHECKING:
    from distlaunch.config.run import RunConfig


class EngineSection(Section):
    """The section `engine` of one kind, with the traits of that kind.

    A package adds a kind with a subclass and an entry point of the group `distlaunch.engines` that names the
    subclass. The name of the entry point is the kind. The default traits are those of an engine that uses other hosts.
    """

    is_neutral: ClassVar[bool] = True

    kind: Any
    """A different literal in each engine; the first field, so that it comes first in files."""

    implementation: ClassVar[str]
    """`module:factory` of the engine. The factory takes this section, a `cluster.machine.Machine` and an
    `engines.base.HostFiles`, and returns an `engines.base.Engine`. It is a string, so that the modules of an engine are
    imported only when it is used."""
    queue: ClassVar[str] = ""
    """`module:class` of the `engines.base.Queue` in which jobs wait for their hosts; empty if there is none."""
    is_here: ClassVar[bool] = False
    """True if the job uses the devices of this machine."""
    joins_given_cluster: ClassVar[bool] = False
    """True if a command that finds TF_CONFIG in its environment starts one task of the cluster described there."""
    file_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that hold a path, which is relative to the config file."""

    warm_start: bool = True
    """Fork tasks from a process that has imported the framework, which saves each of them seconds.
    `false`: each gets a fresh process."""

    def resolve(self, environ: Mapping[str, str]) -> EngineSection:
        """Return the section to use in this environment; for `auto`, that of the engine which `auto` selects."""
        return self

    def for_one_device(self, environ: Mapping[str, str]) -> EngineSection:
        """Return the section of the engine that evaluates, predicts with or exports a model trained by this one."""
        return self

    def why_no_hosts(self, environ: Mapping[str, str]) -> str:
        """Return why a process in this environment can have no hosts of the engine; empty if it can."""
        return ""

    def is_secondary_task(self, environ: Mapping[str, str]) -> bool:
        """Return True if the scheduler has started this command several times and another process does the work."""
        return False

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """Yield the problems of the section, with keys that begin with `engine`.

        Args:
            config: the complete config. Only its section `cluster` may be read.
        """
        yield from ()

    def machine_problems(self) -> Iterator[Problem]:
        """Yield problems of the section on this machine, such as a missing file.

        Only commands such as `validate` call this method. At a start, `Engine.allocate` reports problems.
        """
        yield from ()


class Local(EngineSection):
    """Engine that starts all tasks on this machine, whatever the environment says."""

    kind: Literal["local"]

    implementation: ClassVar[str] = "distlaunch.engines.local:local_engine"
    is_here: ClassVar[bool] = True


class RemoteSection(EngineSection):
    """The common keys of engines whose hosts are reached over a network."""

    interface: str | None = None
    """The network over which tasks connect to each other: the name of an interface, or a network such as 10.0.0.0/8.
    null: the network over which this machine reaches the hosts, or the first that works."""
    python: str | None = None
    """The Python interpreter on the hosts; null: the same path as here."""
    folder: str | None = None
    """The working directory of tasks on the hosts; null: the same path as here."""
    sync: Literal["none", "code"] = "none"
    """The way that the code of this folder gets to the hosts. `none`: the hosts must already have the same code, which
    is checked. `code`: files that git tracks or would add, or all files if there is no git repository, are sent to
    hosts that do not have them. Runs are not sent, and neither are untracked files that are hidden or look like
    secrets."""
    sync_files: Annotated[list[str], Words("a list of files, such as [.env]")] = Field(default_factory=list)
    """Files of this folder that `sync: code` also sends, although they are hidden or look like secrets."""
    host_timeout_s: Annotated[float, Field(ge=3, le=1_000_000, allow_inf_nan=False)] = 15.0
    """Time without a message from a host after which it counts as lost."""

    def forwarded_variables(self) -> list[str]:
        """Return the names of variables that are forwarded to tasks, in addition to those of the frameworks."""
        return []

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        for name in ("python", "folder"):
            path = getattr(self, name)
            if path is not None and not path.startswith("/"):
                message = f"got {path!r}; expected an absolute path, which is the same on all hosts"
                yield Problem(("engine", name), message)
