"""The state of a model on a mesh, as checkpoints and plans have it; the same for DTensor and JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from distlaunch.strategies.state import State
from distlaunch.strategies.variables import (
    checked_value,
    named_metrics,
    plain_state,
    restore_plain,
    saved_values,
    state_variables,
)

Bounds = list[list[int]]
"""First and last + 1 of each dimension."""


def state_of(
    model: keras.Model, sums: Mapping[str, Any], steps_in_epoch: int, value_of: Callable[[Any], np.ndarray]
) -> State:
    """A snapshot.

    Args:
        value_of: a copy of the whole value of a variable, also where other processes hold parts of it.
        sums: of the scalars that the step returns beside the model's metrics, by name.
    """
    state = {name: value_of(variable) for name, variable in snapshot_variables(model).items()}
    return {**state, **log_state(model, sums, steps_in_epoch)}


def snapshot_variables(model: keras.Model) -> dict[str, Any]:
    """The variables of a snapshot, by name."""
    return {**state_variables(model), **named_metrics(model)}


def log_state(model: keras.Model, sums: Mapping[str, Any], steps_in_epoch: int) -> State:
    """Return what a snapshot has beside the variables on the mesh."""
    state = {f"log/{name}": np.array(value) for name, value in sums.items()}
    return {**plain_state(model), **state, "log/steps_in_epoch": np.array(steps_in_epoch, np.int64)}


def restore_state(
    model: keras.Model, state: State, assign: Callable[[Any, np.ndarray], None] = lambda one, value: one.assign(value)
) -> tuple[dict[str, np.ndarray], int]:
    """Puts a snapshot back into the model's variables; returns the sums and the steps of the epoch.

    Args:
        assign: gives a variable its value.

    Raises:
        StateMismatchError: a variable is missing or has another shape.
    """
    for variable, value in saved_values(model, state):
        assign(variable, value)
    restore_plain(model, state)
    # a checkpoint of a model with other metrics is no mistake: they begin anew
    model.reset_metrics()
    metrics = named_metrics(model)
    if all(name in state for name in metrics):
        for name, variable in metrics.items():
            variable.assign(checked_value(name, variable, state))
    sums = {name.removeprefix("log/"): value for name, value in state.items() if name.startswith("log/")}
    steps = int(sums.pop("steps_in_epoch", 0))
    return {name: value.astype(np.float32) for name, value in sums.items()}, steps


def described_mesh(sizes: Mapping[str, int], inputs: Sequence[str | None]) -> dict[str, Any]:
    """A mesh as the event VariablesPlaced has it; its devices are numbered through, over all processes."""
    shape = [int(size) for size in sizes.values()]
    return {"axes": list(sizes), "shape": shape, "devices": list(range(math.prod(shape))), "inputs": list(inputs)}


def placed(
    name: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    axes: Sequence[str | None],
    devices: Iterable[tuple[int, Bounds]],
) -> dict[str, Any]:
    """One variable as the event VariablesPlaced has it, from what each device holds of it."""
    parts = [
        {
            "task": f"device:{device}",
            "rows": bounds[0] if shape and bounds[0] != [0, shape[0]] else None,
            "bounds": bounds,
            "bytes": int(np.prod([stop - start for start, stop in bounds])) * dtype.itemsize,
        }
        for device, bounds in devices
    ]
    return {"name": name, "shape": list(shape), "dtype": dtype.name, "layout": list(axes), "parts": parts}
