"""Whether an existing run can be continued."""

from __future__ import annotations

from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir
from distlaunch.config.read.load import load_resolved
from distlaunch.config.run import RunConfig


def has_more_to_do(config: RunConfig, run: RunDir) -> bool:
    """Whether the run did not come to its end, or the config has more epochs than it."""
    if not run.finished():
        return True
    try:
        return config.train.epochs > load_resolved(run.config).train.epochs
    except ConfigError:  # of another version: nothing to go on with
        return False
