"""What a worker gives back of the steps that it was given."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Block:
    """What came of a block: steps done, the metrics' values after it, the step's own logs.

    `nonfinite` is the first step in it, from 1, whose loss was not finite; 0: all were.
    """

    done: int
    nonfinite: int
    metrics: list[np.ndarray]
    logs: list[float]
