"""Makes iterators end immediately, which tf.data's own tuning would delay."""

from __future__ import annotations

import functools
from typing import Any

from distlaunch.patches.symbols import Patch, Symbol, internal
from distlaunch.patches.tensorflow_late import tf

_MODULE = "tensorflow.python.data.ops.multi_device_iterator_ops"

PATCH = Patch(
    symbols=(
        Symbol(
            f"{_MODULE}._create_device_dataset",
            "(prototype_ds, incarnation_id, prefetch_buffer_size, experimental_slack)",
        ),
    ),
    why="A distribution strategy gives each device its own iterator, with a thread that tunes it. The thread sleeps "
    "for growing intervals, up to a minute. On cancellation it is woken before it can see the reason, and sometimes "
    "goes back to sleep. Freeing the iterator, as after each validation, waits for the thread. In TensorFlow 2.21, "
    "one wait in eight takes about as long as the iterator was in use.",
    until="TensorFlow's CancellationManager is cancelled before it calls back, or device iterators are not tuned.",
)


def untuned() -> tf.data.Options:
    """Return options without the tuning thread.

    `AUTOTUNE` then means one call per thread of tf.data's pool, at most 16.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


@functools.cache
def install() -> None:
    """Switch off the tuning of device iterators; a second call does nothing."""
    PATCH.check()
    module = internal(_MODULE)
    create = module._create_device_dataset

    def create_untuned(*arguments: Any) -> tf.data.Dataset:
        return create(*arguments).with_options(untuned())

    module._create_device_dataset = create_untuned
