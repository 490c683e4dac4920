"""Summarises a config in one line."""

from __future__ import annotations

from distlaunch.config.run import RunConfig


def summary(config: RunConfig, num_gpus: int | None) -> str:
    """`strategy mirrored, 2 replicas, global batch 64`."""
    strategy = config.strategy
    words = strategy.words(config.cluster, num_gpus)
    return ", ".join([f"strategy {strategy.kind}", *words, f"global batch {config.data.global_batch or 'of the data'}"])
