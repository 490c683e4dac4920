"""Cross-checks of how processes share the data: `data.sharding` and `data.streams`."""

from __future__ import annotations

from collections.abc import Iterator

from distlaunch.base.errors import Problem
from distlaunch.config.read.words import either
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import workers_that_share

_SHARDING, _STREAMS = ("data", "sharding"), ("data", "streams")


def sharing_fits(config: RunConfig, num_gpus: int | None) -> Iterator[Problem]:
    """Who gets which examples is what the strategy and the data function can do."""
    data = config.data
    if data.sharding == "shuffled" and not config.strategy.has_coordinator:
        message = f"got 'shuffled', but the workers of {config.strategy.kind} take every step together"
        yield Problem(_SHARDING, f"{message}; write 'rows' or 'function'")
    if data.sharding == "function":
        yield from _function_fits(config)
    if data.streams is not None:
        yield from _streams_fit(config)
    if data.gives_context:
        yield from _context_fits(config)


def _function_fits(config: RunConfig) -> Iterator[Problem]:
    data, workers = config.data, config.cluster.num_workers
    if data.preprocessing is not None:
        message = "it learns from all training examples, and with `data.sharding: function` no process has them all"
        yield Problem(("data", "preprocessing"), f"{message}; make the layer part of the model, or use 'rows'")
    if data.global_batch is None:
        yield Problem(("data", "global_batch"), "missing: `data.sharding: function` needs it; add it below `data:`")
    elif config.strategy.in_lockstep and data.global_batch < workers:
        message = f"got {data.global_batch}, but {workers} workers each give a part of it; use at least {workers}"
        yield Problem(("data", "global_batch"), message)
    if config.strategy.has_coordinator and config.train.steps_per_epoch is None:
        message = "missing: with `data.sharding: function` no process knows how many examples the workers have together"
        yield Problem(("train", "steps_per_epoch"), f"{message}; say how many steps an epoch has")


def _streams_fit(config: RunConfig) -> Iterator[Problem]:
    data, workers = config.data, config.cluster.num_workers
    streams, batch = data.streams, data.global_batch
    assert streams is not None, "asked for only then"
    if batch is None:
        yield Problem(("data", "global_batch"), "missing: `data.streams` needs it; add it below `data:`")
        return
    if config.strategy.has_coordinator:
        message = f"got {streams}, but {config.strategy.kind} gives any batch to any worker, and streams only go on"
        yield Problem(_STREAMS, f"{message}; use files that can be read by number, or `data.sharding: function`")
    elif config.strategy.in_lockstep and streams % workers:
        message = f"got {streams}, which {workers} workers cannot share equally; use a multiple of {workers}"
        yield Problem(_STREAMS, f"{message}, or {workers_that_share(streams, workers)} workers")
    if batch % streams:
        below = batch // streams * streams
        choices = either(str(size) for size in (below, below + streams) if size)
        message = f"got {batch}, of which {streams} streams cannot give equal parts; use {choices}, or other streams"
        yield Problem(("data", "global_batch"), message)
    if data.batched:
        message = "got true, but each stream gives a part of a batch; let the data function yield examples"
        yield Problem(("data", "batched"), f"{message}, and remove it")
    if data.remainder == "drop":
        message = "got 'drop', but the last batches of streams differ in size, as the streams differ in length"
        yield Problem(("data", "remainder"), f"{message}; remove it")
    if data.on_error == "skip":
        message = "got 'skip', but a stream gives no example by number to take the place of one that fails"
        yield Problem(("data", "on_error"), f"{message}; write 'stop', and `.ignore_errors()` in the data function")
    if data.sharding != "rows":
        yield Problem(
            _SHARDING, f"got '{data.sharding}', but streams are shared by distlaunch; remove it, or `streams`"
        )


def _context_fits(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    why = "data.streams" if data.streams is not None else "data.sharding: function"
    if data.tfds is not None:
        yield Problem(
            ("data", "tfds"), f"got it with `{why}`, which needs a data function of your own; use `function:`"
        )
    if "context" in data.args:
        yield Problem(("data", "args", "context"), f"distlaunch gives it, because of `{why}`; remove it")
    for name in ("train_examples", "validation_examples"):
        if getattr(data, name) is not None and (name == "train_examples" or data.streams is not None):
            message = f"got {getattr(data, name)}, but with `{why}` no process has all examples"
            yield Problem(("data", name), f"{message}; take fewer in the data function")
