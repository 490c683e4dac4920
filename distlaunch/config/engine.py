"""`engine:`, the hosts on which the tasks of a run are started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.config.base import Section, Words
from distlaunch.config.slurm import Slurm

HOSTS = Words('a list of hosts, such as [a, "b slots=2", user@c:2222]')


@dataclass(frozen=True)
class EngineKind:
    """One engine.

    Attributes:
        factory: `module:function` below `distlaunch.engines`; the function takes the section `engine`, the environment
            and an `engines.base.HostFiles`.
        is_here: whether this machine's devices are those of the job.
    """

    factory: str
    is_here: bool = False


ENGINES = {
    "local": EngineKind("local:local_engine", is_here=True),
    "ssh": EngineKind("ssh:ssh_engine"),
    "slurm": EngineKind("slurm.allocation:slurm_engine"),
}
_Kind = Literal[("auto", *ENGINES)]  # pyright: ignore[reportInvalidTypeForm, reportInvalidTypeArguments]


class Engine(Section):
    """Where the tasks run."""

    is_neutral: ClassVar[bool] = True

    kind: _Kind = "auto"  # pyright: ignore[reportInvalidTypeForm]
    """`auto`: as one task of the cluster that the environment variable TF_CONFIG describes, if it is set; else on the
    nodes of the Slurm allocation that this command is in; else on this machine. `local`: on this machine, whatever the
    environment says. `ssh`: on `hosts`. `slurm`: on the nodes of the allocation."""
    hosts: Annotated[list[str], HOSTS] = Field(default_factory=list)
    """Of `ssh`: HOST, USER@HOST or USER@HOST:PORT as ssh knows them, perhaps followed by `slots=N` (workers that it
    takes; default: one for each GPU, or one), `python=PATH` and `folder=PATH`."""
    hostfile: str | None = None
    """Of `ssh`: a file with one host a line, written as in `hosts`, in place of them; relative to the config file."""
    interface: str | None = None
    """Of `ssh` and `slurm`: the network by which tasks reach each other: an interface's name, or a network such as
    10.0.0.0/8. null: the one by which ssh comes, or the first that works."""
    python: str | None = None
    """Of `ssh` and `slurm`: the Python interpreter on the hosts; null: the same path as here."""
    folder: str | None = None
    """Of `ssh` and `slurm`: the working directory of tasks on the hosts; null: the same path as here."""
    env: Annotated[list[str], Words("a list of names, such as [MY_VARIABLE]")] = Field(default_factory=list)
    """Of `ssh`: variables of this environment that tasks get, besides those of TensorFlow, Keras, JAX, XLA, NCCL, gRPC
    and OpenMP, which they get anyway."""
    sync: Literal["none", "code"] = "none"
    """Of `ssh` and `slurm`: how the code of this folder gets to the hosts. `none`: it is there; that it is equal is
    checked. `code`: the files that git knows, or all but hidden ones, are sent to hosts that do not have them, without
    runs, and without untracked files that look like secrets (`.env*`, `id_*`, `*.pem`, `*.key`)."""
    sync_files: Annotated[list[str], Words("a list of files, such as [.env]")] = Field(default_factory=list)
    """Of `ssh` and `slurm`: files of this folder that `sync: code` sends too, although they look like secrets."""
    host_timeout_s: Annotated[float, Field(ge=3, le=1_000_000, allow_inf_nan=False)] = 15.0
    """Of `ssh` and `slurm`: a host that shows no sign of life for so long is lost."""
    warm_start: bool = True
    """Whether tasks are forked from a process that has imported the framework, which saves each of them seconds.
    `false`: each gets a fresh process."""

    slurm: Annotated[Slurm, Words("a section, such as {partition: gpu, time: 4:00:00}")] = Field(default_factory=Slurm)
    """Of `slurm`: what `distlaunch submit` asks Slurm for."""

    @property
    def is_here(self) -> bool:
        """Whether this machine's devices are those of the job."""
        return self.kind == "auto" or ENGINES[self.kind].is_here
