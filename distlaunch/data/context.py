"""The argument `context` of a data function: which worker or stream the function returns data for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerContext:
    """The worker whose training examples a data function returns (`data.sharding: function`).

    Like `tf.distribute.InputContext`, whose `num_input_pipelines` and `input_pipeline_id` these are.

    Attributes:
        num_workers: how many there are.
        worker: which one, from 0.
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
