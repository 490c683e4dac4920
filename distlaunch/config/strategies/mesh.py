"""Strategies with a mesh: one program over devices that are arranged along named axes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distlaunch.base.errors import Problem
from distlaunch.config.backend import Backend
from distlaunch.config.base import Words
from distlaunch.config.cluster import Cluster
from distlaunch.config.read.tree import Key
from distlaunch.config.read.words import did_you_mean, listed, show
from distlaunch.config.strategies.base import (
    CPU_DEVICES,
    FUNCTIONAL_STEP,
    STEP,
    StrategySection,
    TrialSections,
    counted,
    workers_that_share,
)

AUTO_AXIS = "model"
"""The mesh axis that `layout: auto` splits variables over."""

Axis = Annotated[str | None, Words("the name of a mesh axis, or ~ for a dimension that is not split")]
MeshSizes = Annotated[
    dict[str, int],
    Field(
        min_length=1,
        description="axis name -> size; one size may be -1 and is then computed from the number of devices",
    ),
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


class MeshSection(StrategySection):
    """The common base of mesh strategies."""

    mesh: MeshSizes
    layout: Layout = Field(default_factory=dict)
    input_layout: list[Axis] | None = None
    """Axis of each dimension of the inputs. null: examples over the axis `batch`."""

    cluster_keys: ClassVar[frozenset[str]] = frozenset({"workers", "ports"})
    in_lockstep: ClassVar[bool] = True
    places_variables: ClassVar[bool] = True

    def jobs(self, cluster: Cluster) -> dict[str, int]:
        return {"worker": cluster.num_workers} if cluster.num_workers > 1 else {}

    def num_devices(self, cluster: Cluster) -> int | None:
        return None if -1 in self.mesh.values() else self.product // cluster.num_workers

    def num_parts(self, cluster: Cluster, num_gpus: int | None) -> int | None:
        return 1 if self.batch_axis is None else self._size(self.batch_axis, num_gpus)

    def parts_of_worker(self, worker: int, cluster: Cluster, num_gpus: int | None) -> tuple[int, int, int]:
        axis = self.batch_axis
        sizes = [self._size(name, num_gpus) or 1 for name in self.mesh]
        if axis is None:
            return 0, 1, 1
        at = list(self.mesh).index(axis)
        stride, each = math.prod(sizes[at + 1 :]), math.prod(sizes) // cluster.num_workers
        # devices are arranged row by row, process after process
        places = [device // stride % sizes[at] for device in range(worker * each, (worker + 1) * each)]
        return min(places), max(places) - min(places) + 1, sizes[at]

    def devices_needed(self, cluster: Cluster) -> tuple[Key, int]:
        # GPUs for all workers on this machine are checked once the workers are placed
        return ("strategy", "mesh"), self.product // cluster.num_workers

    def parts_in_words(self, cluster: Cluster, parts: int) -> str:
        return f"the batch axis of the mesh, of size {parts},"

    @property
    def product(self) -> int:
        """Product of the axis sizes that are given, not counting an axis of -1."""
        return math.prod(size for size in self.mesh.values() if size > 0)

    @property
    def batch_axis(self) -> str | None:
        """The axis that examples are split over: the first of the input layout, else `batch`; None if there is none."""
        if self.input_layout is not None:
            return self.input_layout[0] if self.input_layout else None
        return "batch" if "batch" in self.mesh else None

    def _size(self, axis: str, num_gpus: int | None) -> int | None:
        """Return the number of devices along an axis; None if it is not known yet, or is not a valid number."""
        size = self.mesh.get(axis, 1)
        if size != -1:
            return size if size > 0 else None
        if num_gpus == 0:
            return CPU_DEVICES
        return num_gpus // self.product if num_gpus and num_gpus % self.product == 0 else None

    def problems(self, num_gpus: int | None) -> Iterator[Problem]:
        """Check that sizes are at least 1, except one of -1, and that layouts use existing axes, each at most once."""
        for axis, size in self.mesh.items():
            if size < 1 and size != -1:
                yield Problem(
                    ("strategy", "mesh", axis),
                    f"got {size}; expected a size of at least 1, or -1 to compute it from the number of devices",
                )
        filled = [axis for axis, size in self.mesh.items() if size == -1]
        if len(filled) > 1:
            key = ("strategy", "mesh", filled[1])
            yield Problem(
                key, f"got -1 for {listed(filled)}; expected it for one axis only; write the size of the others"
            )
        if filled and num_gpus and num_gpus % self.product:
            others = f"{num_gpus} GPUs are not divisible by {self.product}, the product of the other axes' sizes"
            yield Problem(("strategy", "mesh", filled[0]), f"got -1, but {others}; change their sizes")
        yield from self._layout_problems()
        yield from _axes(self.input_layout or [], self.mesh, ("strategy", "input_layout"))

    def _layout_problems(self) -> Iterator[Problem]:
        if self.layout == "auto":
            if AUTO_AXIS not in self.mesh:
                message = f"got 'auto', which splits variables over an axis '{AUTO_AXIS}'"
                axes = f"the mesh has {listed(self.mesh)}; rename an axis, or write rules"
                yield Problem(("strategy", "layout"), f"{message}; {axes}")
            return
        for pattern, axes in self.layout.items():
            key = ("strategy", "layout", pattern)
            yield from _pattern(pattern, key)
            yield from _axes(axes, self.mesh, key)

    def cluster_problems(self, cluster: Cluster, num_gpus: int | None) -> Iterator[Problem]:
        """Check that all workers have the same number of devices."""
        workers, devices = cluster.num_workers, self.product
        if any(size < 1 and size != -1 for size in self.mesh.values()):
            return
        if -1 in self.mesh.values():
            if num_gpus != 0:
                return  # the axis of -1 is filled later, with the number of GPUs that the workers can share
            devices *= CPU_DEVICES
        if devices % workers:
            message = f"got {workers}, which cannot share the mesh's {devices} devices equally"
            choices = workers_that_share(devices, workers)
            yield Problem(("cluster", "workers"), f"{message}; use {choices}, or change the mesh")

    def label(self, cluster: Cluster) -> str:
        return f"{self.kind}, {self._sizes()}"

    def words(self, cluster: Cluster, num_gpus: int | None) -> list[str]:
        workers = [counted(cluster.num_workers, "worker")] if cluster.num_workers > 1 else []
        return [*workers, f"mesh {self._sizes()}"]

    @classmethod
    def trials(cls, replicas: Sequence[int], num_gpus: int) -> Iterator[TrialSections]:
        yield from (({"kind": cls.own_kind(), "mesh": {"batch": number}}, {}) for number in replicas)

    @classmethod
    def trial_on_hosts(cls, workers: int, devices: int) -> TrialSections | None:
        return {"kind": cls.own_kind(), "mesh": {"batch": workers * devices}}, {"workers": workers}

    def _sizes(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())


class DTensorSection(MeshSection):
    """TensorFlow's DTensor: one program over a mesh of devices."""

    kind: Literal["dtensor"]

    implementation: ClassVar[str] = "dtensor.strategy:DTensor"
    refuses_jit_compile: ClassVar[bool] = True
    step_forms: ClassVar[tuple[tuple[str, ...], ...]] = (STEP, FUNCTIONAL_STEP)
    starter: ClassVar[str] = """\
A mesh of four devices: examples are split over the axis `batch`, the layers' units over `model`:
strategy: {kind: dtensor, mesh: {batch: 2, model: 2}, layout: {first/kernel: [~, model], first/bias: [model]}}
"""


class JaxSection(MeshSection):
    """Keras on JAX: one program over a mesh of devices."""

    kind: Literal["jax"]

    implementation: ClassVar[str] = "jax.strategy:Jax"
    backend: ClassVar[Backend] = "jax"
    step_forms: ClassVar[tuple[tuple[str, ...], ...]] = (FUNCTIONAL_STEP,)
    quick_export: ClassVar[str] = "keras"
    starter: ClassVar[str] = """\
The same with JAX (pip install 'distlaunch[jax]'); distlaunch chooses which variables to split:
strategy: {kind: jax, mesh: {batch: 2, model: 2}, layout: auto}
"""

    def on_one_device(self) -> StrategySection:
        """Return a mesh of one device, still on JAX: the model and its step may be written for JAX."""
        return self.model_copy(update={"mesh": dict.fromkeys(self.mesh, 1)})


def _pattern(pattern: str, key: Key) -> Iterator[Problem]:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield Problem(
            key, f"not a regular expression: {error}; to match a character such as ( or + literally, write \\ before it"
        )


def _axes(axes: list[str | None], mesh: dict[str, int], key: Key) -> Iterator[Problem]:
    for index, axis in enumerate(axes):
        if axis is not None and axis not in mesh:
            message = f"got {show(axis)}, which is not an axis of the mesh; expected ~ or one of {listed(mesh)}"
            yield Problem((*key, index), message + did_you_mean(axis, mesh))
    for axis, times in Counter(axis for axis in axes if axis is not None).items():
        if times > 1:
            yield Problem(
                key, f"axis '{axis}' splits {times} dimensions; expected each axis at most once; write ~ for the others"
            )
