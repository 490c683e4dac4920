"""Converts between host arrays and arrays on a DTensor mesh. Each process handles the parts of its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from distlaunch.strategies.mesh.layout import Axes

# TensorFlow's stubs leave out what meshes and layouts can do
Mesh = Any
Layout: Any = dtensor.Layout


def layout_of(mesh: Mesh, axes: Axes) -> Any:
    return Layout([axis or dtensor.UNSHARDED for axis in axes], mesh)


def place(value: Any, layout: Any) -> Any:
    """Put an array on the mesh; every process passes the whole array."""
    whole = tf.constant(value)
    shape: Any = whole.shape.as_list()
    return place_rows(whole, 0, shape, layout)


def place_rows(rows: tf.Tensor, start: int, shape: Sequence[int], layout: Any) -> Any:
    """Return an array on the mesh.

    Args:
        rows: all rows that the devices of this process need.
        start: index of the first of these rows in the array.
        shape: shape of the array.
    """
    splits = [
        (dimension, axis, shape[dimension] // layout.mesh.dim_size(axis))
        for dimension, axis in enumerate(layout.sharding_specs)
        if axis != dtensor.UNSHARDED
    ]
    pieces: Any = rows
    for dimension, _, size in splits:
        pieces = _split_tensors(pieces, dimension, size)
    here = []
    for place in layout.mesh.local_device_locations():
        piece = pieces
        for dimension, axis, size in splits:
            # `rows` begin at `start`, so the first piece is number start // size of the whole array
            piece = piece[place[axis] - (start // size if dimension == 0 else 0)]
        here.append(piece)
    return dtensor.pack(here, layout)


def _split_tensors(pieces: Any, dimension: int, size: int) -> Any:
    """Split each tensor of a nested list into parts of a given size, which is faster than slicing each part."""
    if isinstance(pieces, list):
        return [_split_tensors(piece, dimension, size) for piece in pieces]
    return tf.split(pieces, pieces.shape[dimension] // size, axis=dimension)


def join_parts(components: Sequence[tf.Tensor], shape: Sequence[int], layout: Any) -> np.ndarray | None:
    """Join the parts that the devices of this process hold, or return None if they do not hold all parts."""
    parts = slices_by_device(shape, layout)
    here = [parts[device] for device in layout.mesh.local_device_ids()]
    # compared as text, because slices are not hashable before Python 3.12
    if {str(part) for part in here} != {str(part) for part in parts}:
        return None
    whole = np.empty(shape, components[0].dtype.as_numpy_dtype)
    filled = set()
    for part, component in zip(here, components, strict=True):
        if str(part) not in filled:  # several devices may hold the same part
            whole[part] = np.asarray(component)
            filled.add(str(part))
    return whole


def gather(value: Any) -> np.ndarray:
    """Return a tensor of the mesh as a whole array; every process must call it."""
    whole = Layout.replicated(dtensor.fetch_layout(value).mesh, rank=value.shape.rank)
    return dtensor.unpack(dtensor.relayout(value, whole))[0].numpy()


def slices_by_device(shape: Any, layout: Any) -> list[tuple[slice, ...]]:
    """Return, for each device in the mesh's order, the slices of an array that this device holds."""
    mesh = layout.mesh
    sizes = [mesh.dim_size(axis) for axis in mesh.dim_names]
    found = []
    for place in np.ndindex(*sizes):
        at = dict(zip(mesh.dim_names, place, strict=True))
        part = []
        for size, axis in zip(shape, layout.sharding_specs, strict=True):
            if axis == dtensor.UNSHARDED:
                part.append(slice(0, size))
            else:
                each = size // mesh.dim_size(axis)
                part.append(slice(at[axis] * each, (at[axis] + 1) * each))
        found.append(tuple(part))
    return found


def parts_of_process(mesh: Mesh, axis: str | None) -> tuple[int, int]:
    """Return the index of the first part along an axis that this process's devices hold, and how many they hold."""
    if axis is None:
        return 0, 1
    places = np.unravel_index(mesh.local_device_ids(), [mesh.dim_size(name) for name in mesh.dim_names])
    here = places[mesh.dim_names.index(axis)]
    return int(here.min()), int(here.max() - here.min()) + 1
