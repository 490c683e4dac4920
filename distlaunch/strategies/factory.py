"""Makes the strategy of a run. Each is a file or a folder here, behind one protocol; its config class says which."""

from __future__ import annotations

import importlib
from types import ModuleType

from distlaunch.cluster.spec import Task
from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import StrategySection
from distlaunch.strategies.protocol import Strategy


def create(config: RunConfig, task: Task) -> Strategy:
    """The strategy of a run, set up in this process. Must come before any TensorFlow operation."""
    made = getattr(import_module(config.strategy), config.strategy.implementation.partition(":")[2])
    return made(config.strategy, task, config.cluster)


def import_module(strategy: StrategySection | type[StrategySection]) -> ModuleType:
    """Imports what implements a strategy, and no other: TensorFlow's must not import JAX, nor the other way round."""
    return importlib.import_module(f"distlaunch.strategies.{strategy.implementation.partition(':')[0]}")
