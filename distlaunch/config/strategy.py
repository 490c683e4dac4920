"""`strategy:` and `cluster:`, who computes what, and where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from distlaunch.config.base import Positive, PositiveSeconds, Section, Words

Axis = Annotated[str | None, Words("the name of a mesh axis, or ~ for a dimension that is not split")]


class OneDevice(Section):
    """One process, one device: the reference for all others."""

    kind: Literal["one_device"]


class Mirrored(Section):
    """One process, a copy of the model on each of its devices."""

    kind: Literal["mirrored"]
    replicas: Positive | Literal["auto"] = "auto"
    """Devices to use. `auto`: every GPU, or 2 virtual CPU devices where there is none."""


class MultiWorkerMirrored(Section):
    """Several processes (`cluster.workers`), each with one or more copies of the model."""

    kind: Literal["multi_worker_mirrored"]
    replicas_per_worker: Positive | Literal["auto"] = "auto"
    """Devices of each worker. `auto`: its share of the GPUs, or one CPU device."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """How gradients are summed over workers. `auto`: NCCL between GPUs, a gRPC ring otherwise."""


class Partitioner(Section):
    """How large variables are split over parameter servers."""

    kind: Literal["min_size", "max_size", "fixed_shards"]
    min_shard_bytes: Positive | None = None
    max_shard_bytes: Positive | None = None
    max_shards: Positive | None = None
    num_shards: Positive | None = None


class ParameterServer(Section):
    """Workers compute, parameter servers hold the variables, updates are asynchronous."""

    kind: Literal["parameter_server"]
    partitioner: Partitioner | None = None
    """None: each variable lies on one server whole."""
    per_worker_data: Literal["sharded", "shuffled"] = "sharded"
    """`sharded`: each batch of an epoch goes to one worker. `shuffled`: each worker draws from all of the training
    data, in an order of its own."""


MeshSizes = Annotated[
    dict[str, int],
    Field(min_length=1, description="axis name -> size; one size may be -1 and is filled"),
    Words("a mapping of axes to sizes, such as {batch: 4, model: 2}"),
]
LayoutRules = Annotated[
    dict[str, list[Axis]],
    Field(
        description="regular expression on variable paths -> axis of each dimension (~: not split); first match wins"
    ),
    Words("a mapping of regular expressions to lists of axes, such as {'dense/kernel': [~, model]}"),
]
Layout = Annotated[
    LayoutRules | Literal["auto"],
    Field(description="rules for variables; `auto` proposes some over the axis `model`"),
    Words("'auto', or a mapping of regular expressions to lists of axes, such as {'dense/kernel': [~, model]}"),
]


class DTensor(Section):
    """TensorFlow's DTensor: one program over a mesh of devices."""

    kind: Literal["dtensor"]
    mesh: MeshSizes
    layout: Layout = Field(default_factory=dict)
    input_layout: list[Axis] | None = None


class Jax(Section):
    """Keras on JAX: one program over a mesh of devices."""

    kind: Literal["jax"]
    mesh: MeshSizes
    layout: Layout = Field(default_factory=dict)
    input_layout: list[Axis] | None = None
    """Axis of each dimension of the inputs. None: examples over the axis `batch`."""


Strategy = Annotated[
    OneDevice | Mirrored | MultiWorkerMirrored | ParameterServer | DTensor | Jax,
    Field(discriminator="kind"),
    Words("a section with 'kind', such as {kind: mirrored}"),
]


class Span(Section):
    """How many workers a job may have: it begins with `max`, and goes on with fewer after it has lost one."""

    min: Positive = 1
    max: Positive


class Cluster(Section):
    """The processes of a run."""

    workers: Annotated[Positive | Span, Words("a whole number of at least 1, or {min: ..., max: ...}")] = 1
    """Worker processes (multi_worker_mirrored, parameter_server, dtensor, jax); `{min: 1, max: 4}` for a job that may
    go on with fewer after it has lost one, at the same global batch size."""
    ps: Annotated[int, Field(ge=0)] = 0
    """Parameter servers (parameter_server)."""
    hosting: Literal["processes", "in_process"] = "processes"
    """`in_process`: servers of a parameter_server cluster live in the coordinator's process."""
    evaluator: bool = False
    """Starts one more task, which evaluates each new checkpoint while training goes on."""
    ports: list[Annotated[int, Field(ge=1, le=65535)]] | Literal["auto"] = "auto"
    """One port for each task, workers first, on this machine. `auto`: free ones."""
    start_timeout_s: PositiveSeconds = 300.0
    """How long the processes may take from their start to the first step."""
    stop_timeout_s: PositiveSeconds = 30.0
    """How long a task may take to stop cleanly before it is killed."""
    stall_timeout_s: PositiveSeconds | None = 1800.0
    """How long training may go without any progress before the job counts as hung; null: for ever."""

    @property
    def num_workers(self) -> int:
        """The workers that a job begins with."""
        return self.workers.max if isinstance(self.workers, Span) else self.workers
