"""Checks, before the first step, that XLA computes a model's convolutions and poolings on a mesh as on one device.

XLA's partitioner has returned wrong gradients without an error (see `patches.jax_partitioning`). Known errors are
avoided. This module finds unknown ones, in an untested release of JAX or on an untested mesh. Each kind of operation in
the traced step is computed with its gradients on tiny arrays, once with the model's layouts on the mesh and once on one
device. The check runs while the step is compiled. Its results are stored in the user's cache directory, separately for
each version of JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.base.cache_dir import cache_directory
from distlaunch.base.errors import ConfigError, Problem
from distlaunch.base.plural import listed
from distlaunch.base.run_dir import write_atomically
from distlaunch.patches.jax_partitioning import Uncertain, computed_exactly
from distlaunch.strategies.coordination import Peers
from distlaunch.strategies.jax.feed import place
from distlaunch.strategies.mesh.layout import Axes, dividing_axes

CONVOLUTION = "conv_general_dilated"
"""Name of the primitive."""
_WINDOWS = ("reduce_window_max", "reduce_window_min", "reduce_window_sum")
_TOLERANCE = 1e-3
"""Allowed deviation, relative to the largest value.

On these tiny arrays, rounding causes deviations below 1e-5. The known wrong results of XLA count a part of the arrays
twice, so they deviate far more.
"""
_GROUPS = 4
_CHANNELS = 2
_VERSION = 1
QUICK_ON_CPU = {"xla_backend_optimization_level": 0}
"""Options for fast compilation of code that runs only once. They have no effect on partitioning."""


@dataclass(frozen=True)
class Operation:
    """A kind of operation, on tiny arrays.

    Attributes:
        layer: the first layer of the model that uses the operation.
        compute: function that computes the operation on arrays of these shapes.
        shapes: shape of each array.
        axes: mesh axis of each dimension of each array.
        description: text that identifies the kind.
    """

    layer: str
    compute: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[Axes, ...]
    description: str


class OperationChecks:
    """Checks the operations of a step on a mesh.

    Args:
        input_axes: mesh axis of each dimension of the inputs.
        layouts: axes of the weights that are split, by their shapes.
        peers: the processes whose devices form the mesh; all of them check at the same time.
    """

    def __init__(
        self, mesh: Mesh, input_axes: Axes, layouts: Mapping[tuple[int, ...], Sequence[Axes]], peers: Peers
    ) -> None:
        self._mesh, self._axes, self._layouts, self._peers = mesh, input_axes, layouts, peers
        self._quick = QUICK_ON_CPU if mesh.devices.flat[0].platform == "cpu" else {}
        whole = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda values: values, out_shardings=whole, compiler_options=self._quick)

    def operations(self, step: ClosedJaxpr) -> list[Operation]:
        """Return the convolutions and reductions over windows in a step's forward pass, without repetitions."""
        found: dict[str, Operation] = {}
        for equation, where in equations(step.jaxpr):
            name = equation.primitive.name
            if "transpose(" in where or not all(
                jnp.issubdtype(one.aval.dtype, jnp.floating) for one in equation.invars
            ):
                continue
            made: Iterable[Operation] = ()
            if name == CONVOLUTION and equation.params["batch_group_count"] == 1:
                made = self._convolutions(equation, _layer(where))
            elif name in _WINDOWS:
                made = (self._window(equation, _layer(where)),)
            for each in made:
                found.setdefault(each.description, each)
        return list(found.values())

    def find_deviating(self, operations: Sequence[Operation], uncertain: Uncertain) -> list[tuple[Operation, float]]:
        """Return the operations that deviate from one device, each with its largest relative deviation."""
        if not operations:
            return []
        random = np.random.default_rng(0)
        given = [[random.normal(size=shape).astype(np.float32) for shape in each.shapes] for each in operations]
        shardings_of_arrays = [[self._sharding(axes) for axes in each.axes] for each in operations]
        placed = jax.tree.map(place, given, shardings_of_arrays)

        def computed(arrays: list[list[Any]], remedies: Uncertain) -> list[Any]:
            with computed_exactly(remedies):
                return [_with_gradients(each, own) for each, own in zip(operations, arrays, strict=True)]

        def on_mesh(arrays: list[list[Any]]) -> list[Any]:
            return computed(arrays, uncertain)

        def alone(arrays: list[list[Any]]) -> list[Any]:
            return computed(arrays, Uncertain())

        # gradients have the shardings of their arrays
        shardings = [(None, tuple(each)) for each in shardings_of_arrays]
        values = jax.jit(on_mesh, out_shardings=shardings, compiler_options=self._quick)(placed)
        found = jax.tree.map(np.asarray, self._gather(values))
        with jax.default_device(jax.local_devices()[0]):
            expected = jax.tree.map(np.asarray, jax.jit(alone, compiler_options=self._quick)(given))
        return [
            (each, worst)
            for each, got, right in zip(operations, found, expected, strict=True)
            if (worst := _deviation(got, right)) > _TOLERANCE
        ]

    def check(self, operations: Sequence[Operation], uncertain: Uncertain, strongest: Uncertain) -> list[Operation]:
        """Return the operations that are computed correctly only if all remedies are applied.

        Args:
            uncertain: the remedies with which the step was traced.
            strongest: all remedies.

        Raises:
            ConfigError: an operation is computed incorrectly even with all remedies.
        """
        cache = _CachedResults(self._mesh, uncertain) if self._peers.is_chief else None
        # other hosts may have other cached results, but all processes must compute the same operations
        known: dict[str, bool] = json.loads(self._peers.from_chief(json.dumps(cache.read() if cache else {}).encode()))
        new = [each for each in operations if each.description not in known]
        wrong = [each for each, _ in self.find_deviating(new, uncertain)]
        still = self.find_deviating(wrong, strongest)
        if still:
            self._raise_incorrect(still)
        if cache is not None and new:
            cache.write({**known, **{each.description: each not in wrong for each in new}})
        return [each for each in operations if each in wrong or not known.get(each.description, True)]

    def _raise_incorrect(self, wrong: Sequence[tuple[Operation, float]]) -> None:
        sizes = ", ".join(f"{axis}: {size}" for axis, size in self._mesh.shape.items())
        layers = listed([f"'{each.layer}'" for each, _ in wrong])
        message = (
            f"got {{{sizes}}}, on which JAX {jax.__version__} computes other values or gradients for {layers} than on "
            f"one device (by up to {100 * max(worst for _, worst in wrong):.0f} %, on small arrays)"
        )
        raise ConfigError(
            Problem(("strategy", "mesh"), f"{message}; use a mesh with one axis, or a strategy with replicas")
        )

    def _convolutions(self, equation: Any, layer: str) -> Iterator[Operation]:
        """Yield an operation for each layout of a kernel of this shape."""
        inputs, kernel = (one.aval.shape for one in equation.invars)
        params = equation.params
        inputs_at, kernel_at = params["dimension_numbers"].lhs_spec, params["dimension_numbers"].rhs_spec
        axes = tuple(dividing_axes(inputs, self._axes, self._mesh.shape))
        groups = min(params["feature_group_count"], _GROUPS)
        for kernel_axes in (*self._layouts.get(tuple(kernel), ()), ()):
            parts = self._parts(kernel, kernel_axes)
            to_one = min(kernel[kernel_at[1]], _CHANNELS) * parts[kernel_at[1]]
            of_each = min(kernel[kernel_at[0]] // params["feature_group_count"], _CHANNELS) * parts[kernel_at[0]]
            small, small_kernel = list(inputs), list(kernel)
            small_kernel[kernel_at[0]], small_kernel[kernel_at[1]] = groups * of_each, to_one
            small[inputs_at[0]] = self._rows(inputs, axes, inputs_at[0])
            small[inputs_at[1]] = groups * to_one
            for number, dimension in enumerate(inputs_at[2:]):
                reach = (kernel[kernel_at[2 + number]] - 1) * params["rhs_dilation"][number] + 1
                few = reach + params["window_strides"][number] - sum(params["padding"][number])
                small[dimension] = self._places(inputs, axes, dimension, -(-few // params["lhs_dilation"][number]) + 1)
            options = {
                **params,
                "feature_group_count": groups,
                "precision": (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST),
                "preferred_element_type": None,
            }
            yield _operation(equation, layer, options, [small, small_kernel], [axes, kernel_axes])

    def _window(self, equation: Any, layer: str) -> Operation:
        (shape,) = (one.aval.shape for one in equation.invars)
        params = equation.params
        axes = tuple(dividing_axes(shape, self._axes, self._mesh.shape))
        small = []
        for dimension in range(len(shape)):
            reach = (params["window_dimensions"][dimension] - 1) * params["window_dilation"][dimension] + 1
            few = reach + params["window_strides"][dimension] - sum(params["padding"][dimension])
            places = -(-few // params["base_dilation"][dimension]) + 1
            small.append(self._places(shape, axes, dimension, places) if dimension else self._rows(shape, axes, 0))
        return _operation(equation, layer, params, [small], [axes])

    def _parts(self, shape: Sequence[int], axes: Axes) -> list[int]:
        """Return the number of parts that each dimension is split into."""
        names = [*axes, *[None] * (len(shape) - len(axes))]
        return [1 if name is None else self._mesh.shape[name] for name in names]

    def _rows(self, shape: Sequence[int], axes: Axes, dimension: int) -> int:
        return min(shape[dimension], 2 * self._parts(shape, axes)[dimension])

    def _places(self, shape: Sequence[int], axes: Axes, dimension: int, few: int) -> int:
        """Return a small size, at least `few` if possible, that the mesh can split like the real size."""
        part = self._parts(shape, axes)[dimension]
        return min(shape[dimension], -(-max(few, 2 * part if part > 1 else 1) // part) * part)

    def _sharding(self, axes: Axes) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*axes))


class _CachedResults:
    """Cached results for a mesh: for each operation, whether it is correct without further remedies."""

    def __init__(self, mesh: Mesh, uncertain: Uncertain) -> None:
        device = mesh.devices.flat[0]
        sizes = [size for size in mesh.shape.values() if size > 1]
        remedies = uncertain.kernels.name, uncertain.windows, uncertain.scatters is not None
        versions = _VERSION, jax.__version__, jaxlib.__version__
        flags = os.environ.get("XLA_FLAGS", ""), bool(jax.config.jax_use_shardy_partitioner)  # pyright: ignore[reportAttributeAccessIssue]
        self._facts = [*versions, device.platform, device.device_kind, sizes, *remedies, *flags]
        folder = cache_directory("operations")
        name = hashlib.sha256(json.dumps(self._facts).encode()).hexdigest()[:24]
        self._path = None if folder is None else folder / f"{name}.json"

    def read(self) -> dict[str, bool]:
        """Return the cached results; empty if the file is missing or damaged."""
        try:
            found = json.loads(self._path.read_bytes()) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        known = found.get("right") if isinstance(found, dict) else None
        return {str(name): value is True for name, value in known.items()} if isinstance(known, dict) else {}

    def write(self, known: Mapping[str, bool]) -> None:
        """Write the results, if possible; without a file, the next run checks again."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps({"facts": self._facts, "right": known}, indent=1))


def _operation(
    equation: Any, layer: str, params: Mapping[str, Any], shapes: Sequence[Sequence[int]], axes: Sequence[Axes]
) -> Operation:
    primitive, sizes = equation.primitive, tuple(tuple(map(int, shape)) for shape in shapes)
    shown = ", ".join(f"{name}={params[name]}" for name in sorted(params))
    return Operation(
        layer,
        lambda *arrays: primitive.bind(*arrays, **params),
        sizes,
        tuple(axes),
        f"{primitive.name} of {sizes} on {tuple(axes)}: {shown}",
    )


def equations(jaxpr: Jaxpr, where: str = "") -> Iterator[tuple[Any, str]]:
    """Yield all equations, including nested ones, each with the names of the enclosing scopes."""
    for equation in jaxpr.eqns:
        inner = f"{where}/{equation.source_info.name_stack}"
        yield equation, inner
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, (ClosedJaxpr, Jaxpr)):
                    yield from equations(part.jaxpr if isinstance(part, ClosedJaxpr) else part, inner)


def _layer(where: str) -> str:
    """Return the innermost name of a scope, without JAX's transformations; Keras opens a scope for each layer."""
    names = re.findall(r"[^/()]+(?=[/)]|$)", where)
    return names[-1] if names else "the model"


def _with_gradients(operation: Operation, arrays: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the operation's values, and the gradients of a loss with respect to its arrays.

    The loss is not a plain sum, and the inputs are computed by another operation, so that XLA treats the operation like
    one inside a model.
    """

    def loss(*own: Any) -> tuple[Any, Any]:
        values = operation.compute(jnp.tanh(own[0]), *own[1:])
        return jnp.mean(jnp.square(values)), values

    (_, values), gradients = jax.value_and_grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)
    return values, gradients


def _deviation(got: Any, expected: Any) -> float:
    worst = 0.0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = float(np.abs(other).max(initial=0.0))
        worst = max(worst, float(np.abs(one - other).max(initial=0.0)) / (scale or 1.0))
    return worst
