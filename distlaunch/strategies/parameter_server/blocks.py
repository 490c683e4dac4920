"""The results of the steps that a worker was assigned, and the wait for them."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false
# (what pyright infers of TensorFlow's functions is often wrong)
from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from distlaunch.strategies.parameter_server.worker_batches import read_failure

STALL_S = 30.0  # a call takes about half a second; after this time it is worth a word
_POLL_S = 0.002  # by so much at most the end of a call is noticed late
_pause = threading.Event()  # never set


@dataclass(frozen=True)
class Block:
    """What came of a block: steps done, the metrics' values after it, the step's own logs.

    `nonfinite` is the first step in it, from 1, whose loss was not finite; 0: all were. `first_pass` is what its worker
    says of its data, see `worker_batches.first_pass`.
    """

    done: int
    nonfinite: int
    first_pass: tuple[int, ...]
    metrics: list[np.ndarray]
    logs: list[float]


def unpacked(vector: np.ndarray, fresh: list[np.ndarray]) -> Block:
    """The block of a vector that has its parts one after the other.

    Args:
        fresh: values of the metrics before any step.
    """
    sizes = [1, 1, 3, *(value.size for value in fresh)]
    done, nonfinite, first_pass, *metrics, logs = np.split(np.asarray(vector), np.cumsum(sizes))
    shaped = [value.reshape(like.shape) for value, like in zip(metrics, fresh, strict=True)]
    return Block(int(done[0]), int(nonfinite[0]), tuple(map(int, first_pass)), shaped, logs.tolist())


def wait_for_blocks(coordinator: Any) -> None:
    """Until all blocks are done. What a worker's data function raised is raised here."""
    report_after_s = STALL_S
    began = time.monotonic()
    try:
        while not coordinator.done():
            _pause.wait(_POLL_S)
            waited = time.monotonic() - began
            if waited > report_after_s:
                # ever more rarely
                report_after_s *= 2
                print(f"waiting for the workers' steps for {waited:.0f} s; one may be suspended", flush=True)
        coordinator.join()
    except tf.errors.OpError:
        # of a data function in this process; TensorFlow's error has only its text
        if (error := read_failure()) is not None:
            raise error from None
        raise
