"""Makes operations of Keras work on DTensor meshes that its metrics use: `MeanIoU` scatters, `AUC` flips."""

from __future__ import annotations

import functools
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal
from distlaunch.patches.tensorflow_late import tf

_CORE, _NUMPY = "keras.src.backend.tensorflow.core", "keras.src.backend.tensorflow.numpy"

PATCH = Patch(
    symbols=(Symbol(f"{_CORE}.scatter", "(indices, values, shape)"), Symbol(f"{_NUMPY}.flip", "(x, axis=None)")),
    why="DTensor computes the shape of `tf.scatter_nd` in 32 bits. With indices of 64 bits, which Keras's confusion "
    "matrices have, the step fails, or the process aborts if the indices are replicated. DTensor has no `tf.reverse`.",
    until="DTensor's expansion of ScatterNd takes the type of the shape from the indices, and it supports ReverseV2.",
)


@functools.cache
def install() -> None:
    """Scatter by indices of 32 bits, and flip by gathering; a second call does nothing."""
    PATCH.check()
    core, numpy = internal(_CORE), internal(_NUMPY)
    scatter, flip = core.scatter, numpy.flip

    @functools.wraps(scatter)
    def scatter_in_32_bits(indices: Any, values: Any, shape: Any) -> Any:
        # enough for tensors of fewer than 2**31 rows
        return scatter(tf.cast(indices, tf.int32), values, shape)

    @functools.wraps(flip)
    def flip_by_gathering(x: Any, axis: int | None = None) -> Any:
        x = tf.convert_to_tensor(x)
        if x.shape.rank is None:
            return flip(x, axis)
        for each in range(x.shape.rank) if axis is None else [axis]:
            flipped = tf.gather(x, tf.range(tf.shape(x)[each] - 1, -1, -1), axis=each)
            flipped.set_shape(x.shape)  # which DTensor forgets
            x = flipped
        return x

    core.scatter, numpy.flip = scatter_in_32_bits, flip_by_gathering
