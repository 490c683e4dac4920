"""Lets several MirroredStrategies live in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from distlaunch.patches.symbols import Patch, Symbol

PATCH = Patch(
    symbols=(
        Symbol(
            "tensorflow.python.distribute.mirrored_strategy.MirroredStrategy.__init__",
            "(self, devices=None, cross_device_ops=None)",
        ),
        Symbol("tensorflow.python.distribute.mirrored_strategy.MirroredStrategy._collective_key_base"),
    ),
    why="All MirroredStrategies of a process number their collectives from the same key, so those of a second one, as "
    "a notebook makes, can be taken for those of the first.",
    until="TensorFlow gives each strategy keys of its own.",
)

_instances = itertools.count(1)


def mirrored_strategy(devices: Sequence[str]) -> tf.distribute.MirroredStrategy:
    """A MirroredStrategy whose collectives cannot be mistaken for those of an earlier one in this process."""
    PATCH.check()
    # TensorFlow counts keys up from the base, so the distance bounds what one strategy may use
    base = next(_instances) * 1_000_000
    # a class attribute: the constructor reads it before any object could be changed
    return type("MirroredStrategy", (tf.distribute.MirroredStrategy,), {"_collective_key_base": base})(devices)
