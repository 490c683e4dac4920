"""How often a job is restarted."""

from __future__ import annotations

from distlaunch.config.cluster import Span
from distlaunch.config.run import RunConfig

AUTO_RESTARTS = 3
"""`restarts.max: auto`, for jobs that are meant to lose tasks: with parameter servers, or with a span of workers."""


def max_restarts(config: RunConfig) -> int:
    """How often a job is started again from its last checkpoint, at most."""
    if config.restarts.max != "auto":
        return config.restarts.max
    expects_losses = config.strategy.has_coordinator or isinstance(config.cluster.workers, Span)
    return AUTO_RESTARTS if expects_losses else 0
