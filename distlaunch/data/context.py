"""Argument `context` of a data function: the worker or stream for which the function returns data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerContext:
    """The worker whose training examples a data function returns (`data.sharding: function`).

    The attributes correspond to `num_input_pipelines` and `input_pipeline_id` of `tf.distribute.InputContext`.

    Attributes:
        num_workers: number of workers.
        worker: index of this worker, from 0.
    """

    num_workers: int
    worker: int


@dataclass(frozen=True)
class StreamContext:
    """The stream whose examples a data function returns (`data.streams`), independent of the number of workers.

    Attributes:
        num_streams: number of streams.
        stream: index of this stream, from 0.
    """

    num_streams: int
    stream: int
