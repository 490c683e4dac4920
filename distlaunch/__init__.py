"""distlaunch: train any Keras 3 model under any distribution strategy, from one YAML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distlaunch.cluster.tf_config import ThisTask

__version__ = "0.3.0.dev0"


def task() -> ThisTask:
    """Return which task of its job this process is: `job`, `index`, `is_chief` and `num_workers`."""
    # imported here, since the package itself must import nothing
    from distlaunch.cluster.tf_config import this_task

    return this_task()
