"""Creates the strategy of a run. Its config class names the module that implements the strategy protocol."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from distlaunch.config.run import RunConfig
from distlaunch.config.strategies.base import StrategySection
from distlaunch.strategies.protocol import Strategy


def create(config: RunConfig) -> Strategy:
    """Return the strategy of a run, set up in this process. Call it before any TensorFlow operation."""
    return implementation(config.strategy)(config.strategy, config.cluster)


def implementation(strategy: StrategySection | type[StrategySection]) -> Callable[..., Strategy]:
    """Return the class of a strategy, called with its config section and the cluster section.

    No other strategy is imported, so that a process on TensorFlow does not import JAX, and vice versa.
    """
    return pkgutil.resolve_name(f"distlaunch.strategies.{strategy.implementation}")
