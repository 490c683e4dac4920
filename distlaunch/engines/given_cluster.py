"""One task of a cluster that TF_CONFIG describes; other launchers, on other hosts perhaps, start the rest."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.cluster.devices import find_gpus
from distlaunch.cluster.spec import ClusterSpec, Place, Task, from_tf_config
from distlaunch.config.run import RunConfig
from distlaunch.engines.base import Needs
from distlaunch.engines.local import LocalAllocation
from distlaunch.plan.train import can_join


def given_cluster(config: RunConfig, environ: Mapping[str, str]) -> tuple[ClusterSpec, Task] | None:
    """The cluster that the environment says this process belongs to; None if there is none, or none is wanted."""
    text = environ.get("TF_CONFIG")
    return from_tf_config(text) if text and config.engine.kind == "auto" and can_join(config) else None


class GivenClusterEngine:
    """Starts that one task as a child of this process."""

    def __init__(self, given: tuple[ClusterSpec, Task]) -> None:
        self._given = given

    def allocate(self, needs: Needs, environ: Mapping[str, str], *, dry: bool = False) -> LocalAllocation:
        return LocalAllocation(environ, (Place(gpus=find_gpus(environ)),), given=self._given)
