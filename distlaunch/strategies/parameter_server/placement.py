"""Which task holds which variable, or which of its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distlaunch.strategies.parameter_server.partition import Shards


def placement_of(variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variables by name as the event VariablesPlaced has them; rows are [first, last + 1], None for all."""
    placed = []
    for name, variable in variables.items():
        shards = variable if isinstance(variable, Shards) else None
        if shards is None:
            parts = [_part(variable, None)]
        else:
            bounds = zip(shards.offsets, shards.offsets[1:], strict=False)
            parts = [_part(part, list(rows)) for part, rows in zip(shards.variables, bounds, strict=True)]
        dtype = tf.as_dtype(variable.dtype).name
        placed.append({"name": name, "shape": tf.TensorShape(variable.shape).as_list(), "dtype": dtype, "parts": parts})
    return placed


def _part(variable: Any, rows: list[int] | None) -> dict[str, Any]:
    size = int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
    return {"task": task_of(variable), "rows": rows, "bytes": size}


def task_of(variable: Any) -> str:
    """The task that holds a variable, such as `ps:1`."""
    raw = variable.value if isinstance(variable, keras.Variable) else variable
    # such as /job:ps/replica:0/task:1/device:CPU:0
    match = re.search(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", raw.device)
    return f"{match[1]}:{match[2]}" if match else ""
