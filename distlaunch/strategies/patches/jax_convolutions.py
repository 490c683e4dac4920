"""Gradients of convolution kernels on meshes where XLA's partitioner gets them wrong."""

# pyright: reportArgumentType=false
# (JAX's functions take more than their types say)
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distlaunch.strategies.patches.symbols import Patch, Symbol

_HOME = "jax._src.lax.convolution"
_DEFINE = Symbol("jax._src.interpreters.ad.defbilinear", "(prim, lhs_rule, rhs_rule)")
_PRIMITIVE = Symbol(f"{_HOME}.conv_general_dilated_p")
_OF_INPUT = Symbol(f"{_HOME}._conv_general_dilated_transpose_lhs")
_OF_KERNEL = Symbol(
    f"{_HOME}._conv_general_dilated_transpose_rhs",
    "(g, lhs, rhs, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, "
    "batch_group_count, precision, preferred_element_type, out_sharding)",
)

PATCH = Patch(
    symbols=(_DEFINE, _PRIMITIVE, _OF_INPUT, _OF_KERNEL),
    why="XLA adds up the gradient of a kernel over axes of the mesh that hold copies: of grouped convolutions on any "
    "mesh with two axes, of all where an example is split while another axis splits nothing. Twice the gradient on an "
    "axis of two (JAX 0.10.2, Shardy and GSPMD alike), without a word.",
    until="test_convolutions.py finds JAX's own rule right on its meshes.",
)


class Kernels(Enum):
    """The convolutions whose gradients do without XLA's partitioning of convolutions."""

    NONE = 0
    GROUPED = 1
    ALL = 2


_chosen: ContextVar[Kernels] = ContextVar("kernels", default=Kernels.NONE)


@contextlib.contextmanager
def kernel_gradients(kernels: Kernels) -> Iterator[None]:
    """Within it, gradients that are traced of these convolutions are sums of products over the places of a kernel."""
    if kernels is not Kernels.NONE:
        _install()
    token = _chosen.set(kernels)
    try:
        yield
    finally:
        _chosen.reset(token)


@functools.cache
def _install() -> None:
    PATCH.check()
    define, primitive, of_input, of_kernel = (part.get() for part in PATCH.symbols)

    def gradient(g: Any, lhs: Any, rhs: Any, **options: Any) -> Any:
        groups, chosen = options["feature_group_count"], _chosen.get()
        wanted = chosen is Kernels.ALL or (chosen is Kernels.GROUPED and groups > 1)
        if not wanted or options["batch_group_count"] > 1 or not np.size(g):
            return of_kernel(g, lhs, rhs, **options)
        return _sum_over_places(g, lhs, rhs.aval, options)

    define(primitive, of_input, gradient)


def _sum_over_places(g: Any, lhs: Any, kernel: Any, options: dict[str, Any]) -> Any:
    """The gradient of a kernel, one matrix product for each of its places.

    A kernel's value at a place is multiplied with the inputs that are at this distance from each output: a strided
    slice of the padded input.

    Args:
        g: gradient of the outputs.
        lhs: the inputs.
        kernel: shape and type of the kernel.
        options: of the convolution.
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
    order = np.argsort([*kernel_at[2:], kernel_at[1], kernel_at[0]])
    return jnp.transpose(whole, order).astype(kernel.dtype)


def _channels_last(spec: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of an array by a specification: rows, places, channels."""
    return (spec[0], *spec[2:], spec[1])
