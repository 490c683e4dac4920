"""Makes the strategy of a run. Each is a file or a folder here, behind one protocol; its config class says which."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import StrategySection
from distlaunch.strategies.protocol import Strategy


def create(config: RunConfig, task: Task) -> Strategy:
    """The strategy of a run, set up in this process. Must come before any TensorFlow operation."""
    return implementation(config.strategy)(config.strategy, task, config.cluster)


def implementation(strategy: StrategySection | type[StrategySection]) -> Callable[..., Strategy]:
    """The class of a strategy, called with its config section, the task and the cluster section.

    Imports no other: TensorFlow's must not import JAX, nor the other way round.
    """
    return pkgutil.resolve_name(f"distlaunch.strategies.{strategy.implementation}")
