"""One task of a cluster that TF_CONFIG describes; other launchers, on other hosts perhaps, start the rest."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.cluster.devices import find_gpus
from distlaunch.cluster.spec import ClusterSpec, Place, Task
from distlaunch.engines.base import Needs
from distlaunch.engines.local import LocalAllocation, LocalEngine


class GivenClusterEngine(LocalEngine):
    """Starts that one task as a child of this process."""

    def __init__(self, given: tuple[ClusterSpec, Task]) -> None:
        self._given = given

    def allocate(self, needs: Needs, environ: Mapping[str, str], *, dry: bool = False) -> LocalAllocation:
        cluster, task = self._given
        # no address and no port: TF_CONFIG has them
        places = (Place(gpus=find_gpus(environ)),)
        return LocalAllocation(
            environ, places, given=self._given, engine="tf_config", num_computing=cluster.num_workers_beside(task)
        )
