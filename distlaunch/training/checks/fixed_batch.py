"""Finds models that accept only one batch size, before a batch of another size ends the training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras

from distlaunch.base.errors import ConfigError, Problem, reason_of
from distlaunch.config.run import RunConfig
from distlaunch.data.batches import Batch
from distlaunch.data.rows import first_row
from distlaunch.patches.keras_private import layers_of
from distlaunch.strategies.patches.keras_dry_step import undo_assignments
from distlaunch.training.build import fixed_batch


def check_fixed_batch(
    config: RunConfig,
    model: keras.Model,
    replicas: int,
    examples: Iterable[int | None],
    first_rows: Callable[[int], Batch],
    warn: Callable[[str], None],
) -> None:
    """Check that a model whose inputs declare a number of rows accepts the numbers that replicas will get.

    Args:
        replicas: number of replicas that share a global batch.
        examples: number of examples of each split; None if unknown.
        first_rows: returns the given number of examples.
        warn: called with warnings.

    Raises:
        ConfigError: the model does not accept such a number; or it keeps state between batches, although there are
            several replicas or a coordinator.
    """
    stateful = next((layer for layer in layers_of(model) if getattr(layer, "stateful", False)), None)
    if stateful is not None:
        message = f"layer '{stateful.name}' (stateful=True) begins each batch with the state after the previous batch"
        if replicas > 1:
            why = f"each of {replicas} replicas would have its own state, but a checkpoint holds only one"
            raise ConfigError(Problem(("strategy", "kind"), f"{message}; {why}; use kind: one_device"))
        if config.strategy.has_coordinator:
            why = "workers get different batches, but would share one state"
            raise ConfigError(Problem(("strategy", "kind"), f"{message}; {why}; use kind: one_device"))
        if not config.strategy.runs_tensorflow:
            warn(f"{message}, but on JAX, Keras begins each batch with zeros; use kind: one_device")
    declared = fixed_batch(model)
    if declared is None:
        return
    batch = config.data.batch
    message = f"the model takes exactly {declared} rows, as its inputs declare, and"
    lasts = {number % batch for number in examples if number} - {0}
    for size in (batch, *sorted(lasts)):
        for rows in sorted(_rows_of_replicas(size, replicas) - {declared}, reverse=True):
            reason = _refusal(model, first_rows(rows))
            if not reason:
                continue
            if size == batch:
                what = f"each of {replicas} replicas would get {rows}" if replicas > 1 else f"it would get {rows}"
                hint = f"write global_batch: {declared * replicas}"
            else:
                what = f"the last batch of a pass has {size}"
                hint = f"use splits whose number of examples is a multiple of {batch}"
            hint += ", or remove the number of rows from the model's inputs"
            raise ConfigError(Problem(("data", "global_batch"), f"{message} {what} ({reason}); {hint}"))


def _rows_of_replicas(batch: int, replicas: int) -> set[int]:
    """Return the numbers of rows that replicas get of a batch; a replica without rows gets a stand-in row."""
    firsts = [first_row(batch, replica, replicas) for replica in range(replicas + 1)]
    return {max(after - first, 1) for first, after in itertools.pairwise(firsts)}


def _refusal(model: Any, rows: Batch) -> str:
    """Return why a model cannot be called with these rows, or an empty string if it can."""
    with undo_assignments():
        try:
            model(keras.utils.unpack_x_y_sample_weight(rows)[0], training=False)
        # the user's layers may raise any error
        except Exception as error:
            return reason_of(error)
    return ""
