"""`engine: {kind: ssh}`: hosts that the user's own ssh reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.base.errors import Problem
from distlaunch.cluster.hosts import EXAMPLE, hostfile_problems, hosts_problems
from distlaunch.config.base import Words
from distlaunch.config.engines.base import RemoteSection

if TYPE_CHECKING:
    from distlaunch.config.run import RunConfig

_HOSTS = Words('a list of hosts, such as [a, "b slots=2", user@c:2222]')


class Ssh(RemoteSection):
    """The hosts that `hosts` or `hostfile` name."""

    kind: Literal["ssh"]

    implementation: ClassVar[str] = "distlaunch.engines.ssh:ssh_engine"
    file_keys: ClassVar[tuple[str, ...]] = ("hostfile",)

    hosts: Annotated[list[str], _HOSTS] = Field(default_factory=list)
    """HOST, USER@HOST or USER@HOST:PORT as ssh knows them, perhaps followed by `slots=N` (maximum number of workers;
    default: one for each GPU, or one without GPUs), `python=PATH` and `folder=PATH`."""
    hostfile: str | None = None
    """A file with one host per line, written as in `hosts`; it replaces `hosts`. Relative to the config file."""
    env: Annotated[list[str], Words("a list of names, such as [MY_VARIABLE]")] = Field(default_factory=list)
    """Variables of this environment that tasks get, besides those of TensorFlow, Keras, JAX, XLA, NCCL, gRPC and
    OpenMP, and the sizes of thread pools, which they get anyway."""

    def forwarded_variables(self) -> list[str]:
        return self.env

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        if self.hosts and self.hostfile is not None:
            yield Problem(("engine", "hostfile"), "got both 'hosts' and 'hostfile'; expected one of them; remove one")
        if not self.hosts and self.hostfile is None:
            yield Problem(("engine",), f"`kind: ssh` without hosts; add `hosts: [...]` or `hostfile: PATH`; {EXAMPLE}")
        for number, message in hosts_problems(self.hosts):
            yield Problem(("engine", "hosts", number), message)
        yield from super().problems(config)

    def machine_problems(self) -> Iterator[Problem]:
        for problem in hostfile_problems(self.hostfile) if self.hostfile is not None else ():
            yield Problem(("engine", "hostfile"), problem)
