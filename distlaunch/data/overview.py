"""Overview of `distlaunch plan --data`: sources, order, rows of each task, and memory of buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from distlaunch.base.run_dir import RunDir
from distlaunch.config.run import RunConfig
from distlaunch.data.read_ahead import batches_ahead
from distlaunch.data.rows import first_row, rows_of_process
from distlaunch.data.source import first_worker, open_splits, with_global_batch
from distlaunch.data.split import Split
from distlaunch.patches.tensorflow_late import tf

_BATCHES, _NUMBERS = 3, 8  # number of batches that are shown, and of examples in each


def overview(config: RunConfig, run: RunDir, num_gpus: int | None) -> dict[str, Any]:
    """Return the overview as JSON types. This process reads the data that the first worker would read.

    Raises:
        ConfigError: the data does not fit the config.
    """
    splits, train, validation = open_splits(config, run, context=first_worker(config))
    config = with_global_batch(config, train)
    both = {"train": train, "validation": validation}
    readers = _readers(config, num_gpus)
    return {
        "origin": splits.origin,
        "sharding": config.data.sharding,
        "streams": config.data.streams,
        "processes": config.data.processes,
        "readers": readers,
        "splits": {name: _describe_split(config, split, readers) for name, split in both.items() if split is not None},
    }


def _readers(config: RunConfig, num_gpus: int | None) -> list[dict[str, Any]]:
    """Return the tasks that read data; an empty list for strategies with a coordinator.

    A batch has `of` parts, of which the task reads `number`, starting with part `first`.
    """
    strategy, cluster = config.strategy, config.cluster
    if strategy.has_coordinator:
        return []
    parts = []
    for worker in range(cluster.num_workers):
        first, number, of = strategy.parts_of_worker(worker, cluster, num_gpus)
        uneven = strategy.has_replicas or of == 1
        parts.append({"task": f"worker:{worker}", "first": first, "number": number, "of": of, "uneven": uneven})
    return parts


def _describe_split(config: RunConfig, split: Split, readers: list[dict[str, Any]]) -> dict[str, Any]:
    batch = config.data.batch
    examples, num_bytes = split.buffer()
    first = [_numbers(split, at, batch, reader) for at in range(_BATCHES) for reader in readers]
    most = max((entry["stop"] - entry["start"] for entry in first), default=batch)
    rows = split.global_batch or batch if split.is_process_local else most
    whole = rows_of_process(split.evaluation_source(), first=0, number=1, of=1)
    spec: Any = whole.element_spec
    ahead = batches_ahead(spec[0], rows)
    loaded = sum(np.asarray(leaf).nbytes for leaf in tf.nest.flatten(split.first_rows(1), expand_composites=True))
    return {
        "examples": split.num_examples,
        "batches": split.num_batches,
        "shuffled": split.name == "train" and config.data.shuffle is not False and not config.data.batched,
        "by_number": split.by_number,
        "work": split.work,
        "first": first,
        "buffer_examples": examples,
        "buffer_bytes": num_bytes,
        "ahead_batches": ahead,
        "ahead_bytes": ahead * rows * loaded,
    }


def _numbers(split: Split, at: int, batch: int, reader: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a batch that a task reads, from `start` to before `stop`, and the indices of some examples."""
    total = batch
    numbers: list[int] = []
    if split.by_number and split.num_examples:
        picked = split.pick(0, at) % split.num_examples if at < (split.num_batches or 0) else np.zeros(0, np.int64)
        total, numbers = len(picked), picked.tolist()
    first, number, of = reader["first"], reader["number"], reader["of"]
    # on a mesh, a batch that is not divisible by the axis is read whole
    whole = not reader["uneven"] and total % of
    start, stop = (0, total) if whole else (first_row(total, first, of), first_row(total, first + number, of))
    shown = numbers[start:stop][:_NUMBERS]
    return {"batch": at, "task": reader["task"], "start": start, "stop": stop, "numbers": shown}
