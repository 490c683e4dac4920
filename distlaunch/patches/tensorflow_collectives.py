"""Makes several MirroredStrategies possible in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from distlaunch.patches.symbols import Patch, Symbol
from distlaunch.patches.tensorflow_late import tf

PATCH = Patch(
    symbols=(
        Symbol(
            "tensorflow.python.distribute.mirrored_strategy.MirroredStrategy.__init__",
            "(self, devices=None, cross_device_ops=None)",
        ),
        Symbol("tensorflow.python.distribute.mirrored_strategy.MirroredStrategy._collective_key_base"),
    ),
    why="All MirroredStrategies of a process number their collectives from the same key, so those of a second one, for "
    "example in a notebook, can be confused with those of the first.",
    until="TensorFlow gives each strategy its own keys.",
)

_instances = itertools.count(1)


def mirrored_strategy(devices: Sequence[str]) -> tf.distribute.MirroredStrategy:
    """Return a MirroredStrategy whose collectives cannot be confused with an earlier one's in this process."""
    PATCH.check()
    # TensorFlow counts keys up from the base, so the distance limits the number of keys for one strategy
    base = next(_instances) * 1_000_000
    # a class attribute, since the constructor already reads it
    return type("MirroredStrategy", (tf.distribute.MirroredStrategy,), {"_collective_key_base": base})(devices)
