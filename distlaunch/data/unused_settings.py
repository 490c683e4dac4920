"""Settings that have no effect on the data that the run has; what the config alone shows is found before it starts."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from distlaunch.config.checks.unused import changed
from distlaunch.config.run import RunConfig
from distlaunch.data.splits import Splits, StreamData


def unused_settings_of(config: RunConfig, splits: Splits) -> Iterator[str]:
    """Yield what is to be said about each."""
    data, validation = config.data, config.validation
    is_pipeline = isinstance(splits.train, (tf.data.Dataset, StreamData))
    # `type` and not `isinstance`: True is an int
    if type(data.shuffle) is int and not is_pipeline:
        why = "the data are no tf.data pipeline, and are shuffled whole"
        yield f"data.shuffle: got {data.shuffle}, a buffer that has no effect: {why}; write `true`"
    if changed(data, "shuffle_buffer_bytes") and not is_pipeline:
        yield "data.shuffle_buffer_bytes: it has no effect: the data are no tf.data pipeline; remove it"
    if splits.validation is not None:
        return
    for key in ("steps", "every_epochs"):
        if validation is not None and changed(validation, key):
            yield f"validation.{key}: it has no effect: there are no validation data"
    if data.validation_examples is not None:
        yield "data.validation_examples: it has no effect: there are no validation data"
