"""The argument `context` of a data function: which worker or stream the function returns data for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerContext:
    """With `data.sharding: function`: one of the workers; the function returns this worker's training examples.

    Like `tf.distribute.InputContext`, whose `num_input_pipelines` and `input_pipeline_id` these are.

    Attributes:
        num_workers: how many there are.
        worker: which one, from 0.
    """

    num_workers: int
    worker: int


@dataclass(frozen=True)
class StreamContext:
    """With `data.streams`: one of the streams; the function returns its examples, whatever the number of workers.

    Attributes:
        num_streams: how many there are.
        stream: which one, from 0.
    """

    num_streams: int
    stream: int
