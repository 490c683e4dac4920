"""Replaces operations that XLA's partitioner computes incorrectly on some meshes."""

# (JAX's functions accept more types than their annotations allow)
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distlaunch.patches.symbols import Patch, Symbol, internal

_CONVOLUTIONS = "jax._src.lax.convolution"
_WINDOWS = "jax._src.lax.windowed_reductions"
_SCATTERS = "jax._src.lax.slicing"
_DEFINE = Symbol("jax._src.interpreters.ad.defbilinear", "(prim, lhs_rule, rhs_rule)")
_CONVOLUTION = Symbol(f"{_CONVOLUTIONS}.conv_general_dilated_p")
_OF_INPUT = Symbol(f"{_CONVOLUTIONS}._conv_general_dilated_transpose_lhs")
_OF_KERNEL = Symbol(
    f"{_CONVOLUTIONS}._conv_general_dilated_transpose_rhs",
    "(g, lhs, rhs, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, "
    "batch_group_count, precision, preferred_element_type, out_sharding)",
)
_DEFINE_JVP = Symbol("jax._src.interpreters.ad.defjvp", "(primitive, *jvprules)")
_MAXIMUM = Symbol(f"{_WINDOWS}.reduce_window_max_p")
_OF_MAXIMUM = Symbol(
    f"{_WINDOWS}._reduce_window_chooser_jvp_rule",
    "(prim, g, operand, *, window_dimensions, window_strides, padding, base_dilation, window_dilation)",
)
_NAMES = ("scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max")
_TAKES = "(operand, scatter_indices, updates, dimension_numbers, ...)"
_SCATTER = tuple(Symbol(f"{_SCATTERS}.{name}", _TAKES) for name in _NAMES)

PATCH = Patch(
    symbols=(_DEFINE, _CONVOLUTION, _OF_INPUT, _OF_KERNEL, _DEFINE_JVP, _MAXIMUM, _OF_MAXIMUM, *_SCATTER),
    why="XLA computes wrong gradients of convolution kernels without an error, both with Shardy and with GSPMD (JAX "
    "0.10.2 to 0.12.0): it sums them over mesh axes that hold copies. This affects grouped convolutions on any mesh "
    "with two axes, and all convolutions if one axis splits an example and another axis splits nothing. Gradients of "
    "maxima over overlapping windows are wrong if an axis splits an example. Updates of a scatter count several times "
    "on meshes with two axes if an axis does not divide them.",
    until="test_partitioning.py finds JAX's own operations correct on its meshes.",
)


class Kernels(Enum):
    """The convolutions whose kernel gradients avoid XLA's partitioning of convolutions."""

    NONE = 0
    GROUPED = 1
    ALL = 2


@dataclass(frozen=True)
class Uncertain:
    """Operations that XLA may compute incorrectly on a mesh.

    Attributes:
        kernels: the convolutions whose kernel gradients may be incorrect.
        windows: whether gradients of maxima over overlapping windows may be incorrect.
        scatters: the mesh, if a scatter may apply an update several times because an axis does not divide the updates'
            shape; otherwise None.
    """

    kernels: Kernels = Kernels.NONE
    windows: bool = False
    scatters: Mesh | None = None


_NOTHING = Uncertain()
_uncertain: ContextVar[Uncertain] = ContextVar("uncertain", default=_NOTHING)


@contextlib.contextmanager
def computed_exactly(uncertain: Uncertain) -> Iterator[None]:
    """Trace replacements of these operations in this context."""
    if uncertain != _NOTHING:
        _install()
    token = _uncertain.set(uncertain)
    try:
        yield
    finally:
        _uncertain.reset(token)


@functools.cache
def _install() -> None:
    PATCH.check()
    of_kernel, of_maximum = _OF_KERNEL.get(), _OF_MAXIMUM.get()

    def gradient_of_kernel(g: Any, lhs: Any, rhs: Any, **options: Any) -> Any:
        groups, kernels = options["feature_group_count"], _uncertain.get().kernels
        wanted = kernels is Kernels.ALL or (kernels is Kernels.GROUPED and groups > 1)
        if not wanted or options["batch_group_count"] > 1 or not np.size(g):
            return of_kernel(g, lhs, rhs, **options)
        return _sum_over_places(g, lhs, rhs.aval, options)

    def tangent_of_maximum(g: Any, operand: Any, **options: Any) -> Any:
        overlaps = any(np.greater(options["window_dimensions"], options["window_strides"]))
        if not _uncertain.get().windows or not overlaps:
            return of_maximum(jax.lax.max_p, g, operand, **options)
        return _tangents_at_maxima(g, operand, options)

    _DEFINE.get()(_CONVOLUTION.get(), _OF_INPUT.get(), gradient_of_kernel)
    _DEFINE_JVP.get()(_MAXIMUM.get(), tangent_of_maximum)
    for name, symbol in zip(_NAMES, _SCATTER, strict=True):
        changed = _with_whole_updates(symbol.get())
        for home in (internal(_SCATTERS), jax.lax):
            setattr(home, name, changed)


def _with_whole_updates(scatter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scatter)
    def scattered(operand: Any, scatter_indices: Any, updates: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = _uncertain.get().scatters
        if mesh is not None:
            # do not split a dimension that some axis does not divide; leave the other dimensions to XLA
            sizes = [size for size in mesh.shape.values() if size > 1]
            free = PartitionSpec.UNCONSTRAINED
            spec = [free if all(number % size == 0 for size in sizes) else None for number in np.shape(updates)]
            updates = jax.lax.with_sharding_constraint(jnp.asarray(updates), NamedSharding(mesh, PartitionSpec(*spec)))
        return scatter(operand, scatter_indices, updates, *args, **kwargs)

    return scattered


def _tangents_at_maxima(g: Any, operand: Any, options: dict[str, Any]) -> Any:
    """Return the tangents at the maxima of windows; the first of equal values counts, as in XLA.

    Args:
        g: tangents of the operand.
        operand: values.
        options: options of the reduction.
    """
    strides, apart = options["window_strides"], options["window_dilation"]
    pads = [(low, high, by - 1) for (low, high), by in zip(options["padding"], options["base_dilation"], strict=True)]
    values = jax.lax.pad(operand, jnp.asarray(-jnp.inf, operand.dtype), pads)
    tangents = jax.lax.pad(g, jnp.zeros((), g.dtype), pads)
    window = options["window_dimensions"]
    reach = [(size - 1) * by for size, by in zip(window, apart, strict=True)]
    most = [whole - last for whole, last in zip(values.shape, reach, strict=True)]
    best: Any = None
    found: Any = None
    for at in np.ndindex(*window):
        starts = [place * by for place, by in zip(at, apart, strict=True)]
        stops = [start + size for start, size in zip(starts, most, strict=True)]
        value, tangent = (jax.lax.slice(each, starts, stops, strides) for each in (values, tangents))
        if best is None:
            best, found = value, tangent
        else:
            is_better = value > best
            best, found = jnp.where(is_better, value, best), jnp.where(is_better, tangent, found)
    return found


def _sum_over_places(g: Any, lhs: Any, kernel: Any, options: dict[str, Any]) -> Any:
    """Return the gradient of a kernel, with one matrix product for each position of the kernel.

    The kernel's value at a position is multiplied with the input at this offset from each output. These inputs are a
    strided slice of the padded input, so the gradient is the product of the slice and the gradient of the outputs.

    Args:
        g: gradient of the outputs.
        lhs: the inputs.
        kernel: shape and dtype of the kernel.
        options: options of the convolution.
    """
    inputs_at, kernel_at, outputs_at = options["dimension_numbers"]
    strides, groups = options["window_strides"], options["feature_group_count"]
    inputs, outputs = jnp.transpose(lhs, _channels_last(inputs_at)), jnp.transpose(g, _channels_last(outputs_at))
    inputs = inputs.astype(outputs.dtype)
    pads = [
        (low, high, apart - 1) for (low, high), apart in zip(options["padding"], options["lhs_dilation"], strict=True)
    ]
    inputs = jax.lax.pad(inputs, jnp.zeros((), inputs.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    rows, *places, channels = outputs.shape
    outputs = outputs.reshape(rows, *places, groups, channels // groups)
    sizes = [kernel.shape[dimension] for dimension in kernel_at[2:]]
    products = []
    for at in np.ndindex(*sizes):
        starts = [place * apart for place, apart in zip(at, options["rhs_dilation"], strict=True)]
        stops = [start + (size - 1) * step + 1 for start, size, step in zip(starts, places, strides, strict=True)]
        depth = inputs.shape[-1]
        piece = jax.lax.slice(inputs, [0, *starts, 0], [rows, *stops, depth], [1, *strides, 1])
        piece = piece.reshape(rows, *places, groups, depth // groups)
        products.append(
            jnp.einsum("n...gi,n...go->igo", piece, outputs, precision=options["precision"],
                       preferred_element_type=jnp.promote_types(outputs.dtype, jnp.float32))
        )  # fmt: skip
    whole = jnp.stack(products).reshape(*sizes, -1, channels)
    order = np.argsort([*kernel_at[2:], kernel_at[1], kernel_at[0]]).tolist()
    return jnp.transpose(whole, order).astype(kernel.dtype)


def _channels_last(spec: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation of a specification's dimensions to rows, positions, channels."""
    return (spec[0], *spec[2:], spec[1])
