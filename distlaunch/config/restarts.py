"""How often a job is started again."""

from __future__ import annotations

from distlaunch.config.run import RunConfig

AUTO_RESTARTS = {"parameter_server": 3}
"""`restarts.max: auto`. Where a job has more tasks, and those not meant to be killed, it is more likely to lose one."""


def max_restarts(config: RunConfig) -> int:
    """How often a job is started again from its last checkpoint, at most."""
    wanted = config.restarts.max
    return AUTO_RESTARTS.get(config.strategy.kind, 0) if wanted == "auto" else wanted
