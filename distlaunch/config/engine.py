"""`engine:`, where the tasks of a run are started."""

from __future__ import annotations

from typing import Literal

from distlaunch.config.base import Section


class Engine(Section):
    """Where the tasks run."""

    kind: Literal["auto", "local"] = "auto"
    """`auto`: as one task of the cluster that the environment variable TF_CONFIG describes, if it is set; else on this
    machine. `local`: on this machine, whatever TF_CONFIG says."""
    warm_start: bool = True
    """Whether tasks are forked from a process that has imported the framework, which saves each of them seconds.
    `false`: each gets a fresh process."""
