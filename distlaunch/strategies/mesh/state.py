"""State of a model on a mesh, in the form of checkpoints and plans, for DTensor and JAX."""

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
    restore_variables,
    state_variables,
    untracked_state,
)

Bounds = list[list[int]]
"""Start and stop index of each dimension."""


def snapshot_variables(model: keras.Model) -> dict[str, Any]:
    """Return the variables of a snapshot, by name."""
    return {**state_variables(model), **named_metrics(model)}


def log_state(model: keras.Model, sums: Mapping[str, Any], steps_in_epoch: int) -> State:
    """Return the values of a snapshot that are not variables on the mesh.

    Args:
        sums: sums, by name, of the scalars that the step returns in addition to the model's metrics.
    """
    state = {f"log/{name}": np.array(value) for name, value in sums.items()}
    return {**untracked_state(model), **state, "log/steps_in_epoch": np.array(steps_in_epoch, np.int64)}


def restore_state(
    model: keras.Model, state: State, assign: Callable[[Any, np.ndarray], None] = lambda one, value: one.assign(value)
) -> tuple[dict[str, np.ndarray], int]:
    """Restore a snapshot into the model's variables, and return the sums of logs and the steps of the epoch.

    Args:
        assign: sets the value of a variable.

    Raises:
        StateMismatchError: a variable is missing or has another shape.
    """
    restore_variables(model, state, assign)
    # the checkpoint may have other metrics; the model's metrics then keep their initial values
    model.reset_metrics()
    metrics = named_metrics(model)
    if all(name in state for name in metrics):
        for name, variable in metrics.items():
            variable.assign(checked_value(name, variable, state))
    sums = {name.removeprefix("log/"): value for name, value in state.items() if name.startswith("log/")}
    steps = int(sums.pop("steps_in_epoch", 0))
    return {name: value.astype(np.float32) for name, value in sums.items()}, steps


def mesh_description(sizes: Mapping[str, int], inputs: Sequence[str | None]) -> dict[str, Any]:
    """Return a mesh in the format of the event VariablesPlaced; its devices are numbered over all processes."""
    shape = [int(size) for size in sizes.values()]
    return {"axes": list(sizes), "shape": shape, "devices": list(range(math.prod(shape))), "inputs": list(inputs)}


def variable_placement(
    name: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    axes: Sequence[str | None],
    devices: Iterable[tuple[int, Bounds]],
) -> dict[str, Any]:
    """Return one variable in the format of the event VariablesPlaced, given the bounds that each device holds."""
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
